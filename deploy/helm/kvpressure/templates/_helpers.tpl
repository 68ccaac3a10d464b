{{- define "kvpressure.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvpressure.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains (include "kvpressure.name" .) .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "kvpressure.name" .) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvpressure.selector" -}}
app.kubernetes.io/name: {{ include "kvpressure.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvpressure.labels" -}}
{{ include "kvpressure.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvpressure.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "kvpressure.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "kvpressure.image" -}}
{{- $name := compact (list (default .Values.image.registry .Values.global.imageRegistry) .Values.image.repository) | join "/" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{- printf "%s@%s" $name .digest -}}
{{- else -}}
{{- printf "%s:%s" $name (default $.Chart.AppVersion .tag) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Pull secrets of this chart and of the umbrella chart, each as an object. */ -}}
{{- define "kvpressure.pullSecrets" -}}
{{- range concat .Values.global.imagePullSecrets .Values.imagePullSecrets | uniq }}
- {{ if kindIs "string" . }}{name: {{ . }}}{{ else }}{{ toJson . }}{{ end }}
{{- end }}
{{- end -}}

{{- /* The port that the kubelet asks: a password, a client certificate or loopback keeps it from the metrics port. */ -}}
{{- define "kvpressure.probePort" -}}
{{- if or .Values.webConfigSecret .Values.listenAddress -}}health{{- else -}}metrics{{- end -}}
{{- end -}}

{{- /* "true" if the pods of one vendor mount the host's /proc. Without hostPID, NVIDIA's driver lists no process to look up. Input: root, vendor. */ -}}
{{- define "kvpressure.readsProc" -}}
{{- with .root.Values -}}
{{- $listed := and .sources.pods (or .hostPID (eq $.vendor "amd")) -}}
{{- if has (toString .sources.procfs) (ternary (list "true" "auto") (list "true") $listed) -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{- /* "true" if the pods see directories of the node. */ -}}
{{- define "kvpressure.usesHost" -}}
{{- $values := .Values -}}
{{- $mounted := and $values.nvidia.enabled $values.nvidia.driverRoot -}}
{{- range list "podresources" "cgroup" "logs" -}}
{{- $mounted = or $mounted (index $values.sources .) -}}
{{- end -}}
{{- range list "nvidia" "amd" -}}
{{- $mounted = or $mounted (and (index $values .).enabled (include "kvpressure.readsProc" (dict "root" $ "vendor" .))) -}}
{{- end -}}
{{- range concat $values.extraVolumes $values.nvidia.extraVolumes $values.amd.extraVolumes -}}
{{- $mounted = or $mounted (hasKey . "hostPath") -}}
{{- end -}}
{{- if $mounted -}}true{{- end -}}
{{- end -}}

{{- /* "true" if the exporter asks the API server for anything. */ -}}
{{- define "kvpressure.usesApi" -}}
{{- if or .Values.sources.pods .Values.sources.node -}}true{{- end -}}
{{- end -}}

{{- /* "true" if an address that the exporter is given holds a name instead of a number. */ -}}
{{- define "kvpressure.asksDns" -}}
{{- range concat .Values.targets (compact (list (index .Values.config "kube.api-url"))) -}}
{{- if not (regexMatch "^(https?://)?([0-9]+(\\.[0-9]+){3}|\\[[0-9A-Fa-f:.]+\\])([:/]|$)" .) -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Seconds of a duration such as 90s or 1m30s. */ -}}
{{- define "kvpressure.seconds" -}}
{{- $units := dict "s" 1 "m" 60 "h" 3600 "d" 86400 -}}
{{- $seconds := 0 -}}
{{- range regexFindAll "[0-9]+[smhd]" . -1 -}}
{{- $seconds = add $seconds (mul (regexFind "^[0-9]+" . | atoi) (index $units (regexFind "[smhd]$" .))) -}}
{{- end -}}
{{- $seconds -}}
{{- end -}}

{{- /* Stop on values that are each fine and cannot be meant together. */ -}}
{{- define "kvpressure.check" -}}
{{- if not .Values.image.repository -}}
{{- fail "image.repository is empty: nobody publishes an image yet; allowed: the repository you pushed the image to that `docker build .` makes, e.g. --set image.repository=registry.internal/kvpressure" -}}
{{- end -}}
{{- if and .Values.rules.file (not (hasKey (fromYaml .Values.rules.file) "groups")) -}}
{{- fail "rules.file has no rule groups; allowed: --set-file rules.file=DIR/alerts/kvpressure-rules.yaml, as kvpressure bundle --out DIR writes it" -}}
{{- end -}}
{{- if and (or .Values.prometheusRule.enabled .Values.rulesConfigMap.enabled) (not .Values.rules.file) -}}
{{- $numbers := regexFind "(?m)^# Thresholds in these rules: .*$" (.Files.Get "files/kvpressure-rules.yaml") -}}
{{- range $name, $_ := .Values.thresholds -}}
{{- if regexMatch (printf " %s(,|$)" $name) $numbers -}}
{{- fail (printf "thresholds.%s is a number of the rules too, which would keep the built-in one; allowed: with rules of your own, kvpressure bundle --thresholds FILE --out DIR and --set-file rules.file=DIR/alerts/kvpressure-rules.yaml (docs/your-site.md)" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with .Values.updateStrategy -}}
{{- $none := list "0" "0%" -}}
{{- if eq (has (toString .maxUnavailable) $none) (has (toString .maxSurge) $none) -}}
{{- fail (printf "updateStrategy.maxUnavailable %v and maxSurge %v: Kubernetes wants one of them to be 0 and the other not; allowed: e.g. maxUnavailable 0 with maxSurge 1" .maxUnavailable .maxSurge) -}}
{{- end -}}
{{- end -}}
{{- if eq (index .Values.config "web.engine-labels" | default "plain") "prefixed" -}}
{{- $rules := and (or .Values.prometheusRule.enabled .Values.rulesConfigMap.enabled) (not .Values.rules.file) -}}
{{- if or $rules .Values.alertmanagerConfig.enabled (and .Values.dashboards.enabled (not .Values.dashboards.files)) -}}
{{- fail "config.web.engine-labels prefixed: the chart's own rules, dashboards and routes have plain names; allowed: those of kvpressure bundle with engine_labels: prefixed (docs/your-site.md), in rules.file and dashboards.files" -}}
{{- end -}}
{{- end -}}
{{- if eq (int .Values.port) (int .Values.healthPort) -}}
{{- fail (printf "healthPort %d is also port; allowed: another port" (int .Values.healthPort)) -}}
{{- end -}}
{{- if and .Values.priorityClassQuota.enabled (not .Values.priorityClassName) -}}
{{- fail "priorityClassQuota.enabled needs a class to admit; allowed: priorityClassName not empty, or priorityClassQuota.enabled false" -}}
{{- end -}}
{{- if and (eq .Values.service.internalTrafficPolicy "Local") (eq .Values.service.clusterIP "None") -}}
{{- fail "service.internalTrafficPolicy Local has no effect on a Service without an address; allowed: service.clusterIP empty" -}}
{{- end -}}
{{- $owned := include "kvpressure.owned" . | fromYaml -}}
{{- range $name, $_ := .Values.config -}}
{{- with index $owned $name -}}
{{- fail (printf "config.%s would leave the pod's port, mounts or rights behind; allowed: the value %s, which sets it" $name .) -}}
{{- end -}}
{{- end -}}
{{- range $values := list "commonLabels" "podLabels" -}}
{{- range $name, $_ := index $.Values $values -}}
{{- if regexMatch "^(app\\.kubernetes\\.io/(name|instance|component|version|managed-by)|helm\\.sh/chart)$" $name -}}
{{- fail (printf "%s: the chart sets %s itself, selectors go by it; allowed: other names (for the name: nameOverride)" $values $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with .Values.monitor -}}
{{- if gt (include "kvpressure.seconds" .scrapeTimeout | int) (include "kvpressure.seconds" .interval | int) -}}
{{- fail (printf "monitor.scrapeTimeout %s is above monitor.interval %s, which Prometheus refuses; allowed: at most the interval" .scrapeTimeout .interval) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.nvidia.driverRoot .Values.nvidia.runtimeClassName -}}
{{- fail (printf "nvidia.driverRoot is for nodes without NVIDIA's runtime; allowed: nvidia.runtimeClassName empty (it is %s), or no driverRoot" .Values.nvidia.runtimeClassName) -}}
{{- end -}}
{{- if and .Values.nvidia.privileged .Values.nvidia.runtimeClassName -}}
{{- fail (printf "nvidia.privileged is for nodes without NVIDIA's runtime; allowed: nvidia.runtimeClassName empty (it is %s), or privileged false" .Values.nvidia.runtimeClassName) -}}
{{- end -}}
{{- if not (or .Values.nvidia.enabled .Values.amd.enabled) -}}
{{- fail "nvidia.enabled and amd.enabled are both false: nothing to deploy; allowed: at least one true" -}}
{{- end -}}
{{- if ne (int .Values.runAsUser) 0 -}}
{{- range list "podresources" "logs" -}}
{{- if index $.Values.sources . -}}
{{- fail (printf "runAsUser %d cannot read what sources.%s needs (root owns it); allowed: runAsUser 0, or sources.%s false" (int $.Values.runAsUser) . .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if not .Values.sources.pods -}}
{{- range list "procfs" "cgroup" "logs" -}}
{{- if eq (index $.Values.sources . | toString) "true" -}}
{{- fail (printf "sources.%s needs to know this node's pods; allowed: sources.pods true, or sources.%s false" . .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.monitor.kind "ServiceMonitor") (not .Values.service.enabled) -}}
{{- fail "monitor.kind ServiceMonitor needs service.enabled true" -}}
{{- end -}}
{{- end -}}
