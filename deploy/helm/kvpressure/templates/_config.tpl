{{- /* The settings file of one vendor's exporter. Input: root, vendor. What stands in .Values.config wins. */ -}}
{{- define "kvpressure.config" -}}
{{- $values := .root.Values -}}
{{- $settings := dict "collector.nvidia" (eq .vendor "nvidia") "collector.amd" (eq .vendor "amd") -}}
{{- $_ := set $settings "web.listen-address" (list (printf "%s:%d" $values.listenAddress (int $values.port))) -}}
{{- if eq (include "kvpressure.probePort" .root) "health" -}}
{{- $_ := set $settings "web.health-listen-address" (list (printf ":%d" (int $values.healthPort))) -}}
{{- end -}}
{{- $readsProc := eq (include "kvpressure.readsProc" .) "true" -}}
{{- range $name, $on := $values.sources -}}
{{- $_ := set $settings (printf "collector.%s" $name) (ternary $readsProc $on (eq $name "procfs")) -}}
{{- end -}}
{{- if not $values.sources.pods -}}
{{- $_ := set $settings "collector.processes" false -}}
{{- end -}}
{{- if $values.sources.podresources -}}
{{- $_ := set $settings "kubelet.socket" "/host/pod-resources/kubelet.sock" -}}
{{- end -}}
{{- if $readsProc -}}
{{- $_ := set $settings "host.proc" "/host/proc" -}}
{{- end -}}
{{- if $values.sources.cgroup -}}
{{- $_ := set $settings "host.cgroup" "/host/cgroup" -}}
{{- end -}}
{{- if $values.sources.logs -}}
{{- $_ := set $settings "host.pod-logs" "/var/log/pods" -}}
{{- end -}}
{{- if $values.recording.enabled -}}
{{- $_ := set $settings "record.directory" "/var/lib/kvpressure/recordings" -}}
{{- $_ := set $settings "record.max-size" (printf "%dMiB" (int $values.recording.maxSizeMiB)) -}}
{{- $_ := set $settings "record.keep" (int $values.recording.keep) -}}
{{- end -}}
{{- with $values.namespaces -}}{{- $_ := set $settings "kube.namespaces" . -}}{{- end -}}
{{- with $values.podSelector -}}{{- $_ := set $settings "kube.selector" . -}}{{- end -}}
{{- with $values.targets -}}{{- $_ := set $settings "engine.target" . -}}{{- end -}}
{{- with $values.webConfigSecret -}}{{- $_ := set $settings "web.config.file" "/etc/kvpressure-web/web-config.yaml" -}}{{- end -}}
{{- with $values.thresholds -}}{{- $_ := set $settings "thresholds" "/etc/kvpressure/thresholds.yaml" -}}{{- end -}}
{{- $other := ternary "(collector|gpu)\\.amd(\\..*)?" "(collector\\.)?nvidia(\\..*)?" (eq .vendor "nvidia") -}}
{{- range $name, $value := $values.config -}}
{{- if not (regexMatch (printf "^%s$" $other) $name) -}}
{{- $_ := set $settings $name $value -}}
{{- end -}}
{{- end -}}
{{- toYaml $settings -}}
{{- end -}}

{{- define "kvpressure.configData" -}}
config.yaml: |
  {{- include "kvpressure.config" . | nindent 2 }}
{{- with .root.Values.thresholds }}
thresholds.yaml: |
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Settings that belong to a value: setting -> value. The pod's port, mounts and rights follow the value, not the setting. */ -}}
{{- define "kvpressure.owned" -}}
web.listen-address: port and listenAddress
web.health-listen-address: healthPort
web.config.file: webConfigSecret
collector.nvidia: nvidia.enabled
collector.amd: amd.enabled
{{- range $name, $_ := .Values.sources }}
collector.{{ $name }}: sources.{{ $name }}
{{- end }}
kubelet.socket: sources.podresources and host.kubelet
host.proc: sources.procfs and host.proc
host.cgroup: sources.cgroup and host.cgroup
host.pod-logs: sources.logs and host.podLogs
record.directory: recording.enabled
record.max-size: recording.maxSizeMiB
record.keep: recording.keep
kube.namespaces: namespaces
kube.selector: podSelector
engine.target: targets
thresholds: thresholds
{{- end -}}
