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
{{- with .Values.image -}}
{{- if .digest -}}
{{- printf "%s@%s" .repository .digest -}}
{{- else -}}
{{- printf "%s:%s" .repository (default $.Chart.AppVersion .tag) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* "true" if the exporter asks the API server for anything. */ -}}
{{- define "kvpressure.usesApi" -}}
{{- if or .Values.sources.pods .Values.sources.node -}}true{{- end -}}
{{- end -}}

{{- /* Stop on values that are each fine and cannot be meant together. */ -}}
{{- define "kvpressure.check" -}}
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
{{- if index $.Values.sources . -}}
{{- fail (printf "sources.%s needs to know this node's pods; allowed: sources.pods true, or sources.%s false" . .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.plugin.volume "emptyDir" -}}
{{- if ne (int .Values.runAsUser) 0 -}}
{{- fail (printf "runAsUser %d cannot read the pods' volumes, which plugin.volume emptyDir needs (root owns their directory); allowed: runAsUser 0, or plugin.volume hostPath" (int .Values.runAsUser)) -}}
{{- end -}}
{{- if not .Values.sources.pods -}}
{{- fail "plugin.volume emptyDir needs to know this node's pods; allowed: sources.pods true, or plugin.volume hostPath" -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.monitor.kind "ServiceMonitor") (not .Values.service.enabled) -}}
{{- fail "monitor.kind ServiceMonitor needs service.enabled true" -}}
{{- end -}}
{{- end -}}
