{{- /*
Rules and dashboards are generated with tokens in place of thresholds and links: @@t:NAME@@ the number, @@w:NAME@@ in words,
@@d:NAME@@ a duration, @@o:NAME@@ "documented" or, once set, "configured",
"@@n:NAME@@" a JSON number, @@u:NAME@@ a link or job of .Values.rules. This fills them in as the generator itself would;
tests/deploy compares both.
*/ -}}
{{- define "kvpressure.number" -}}
{{- regexReplaceAll "\\.?0+$" (printf "%.9f" (float64 .)) "" -}}
{{- end -}}

{{- define "kvpressure.duration" -}}
{{- $seconds := float64 . -}}
{{- if ne $seconds (floor $seconds) -}}
{{- printf "%.0fms" (round (mulf $seconds 1000) 0) -}}
{{- else -}}
{{- include "kvpressure.units" (dict "seconds" (int64 $seconds) "units" (list (list 86400 "d") (list 3600 "h") (list 60 "m") (list 1 "s")) "zero" "0s") -}}
{{- end -}}
{{- end -}}

{{- /* Seconds in the largest unit that is exact. */ -}}
{{- define "kvpressure.units" -}}
{{- $found := "" -}}
{{- $seconds := .seconds -}}
{{- range .units -}}
{{- $size := int64 (first .) -}}
{{- if and (not $found) (gt $seconds 0) (eq (mod $seconds $size) 0) -}}
{{- $found = printf "%d%s" (div $seconds $size) (last .) -}}
{{- end -}}
{{- end -}}
{{- default .zero $found -}}
{{- end -}}

{{- define "kvpressure.span" -}}
{{- $seconds := float64 . -}}
{{- if ne $seconds (floor $seconds) -}}
{{- printf "%s seconds" (include "kvpressure.number" $seconds) -}}
{{- else -}}
{{- $text := include "kvpressure.units" (dict "seconds" (int64 $seconds) "units" (list (list 86400 " days") (list 3600 " hours") (list 60 " minutes") (list 1 " seconds")) "zero" "0 seconds") -}}
{{- if hasPrefix "1 " $text -}}{{- trimSuffix "s" $text -}}{{- else -}}{{- $text -}}{{- end -}}
{{- end -}}
{{- end -}}

{{- /* A threshold as a person reads it. Input: value, unit. */ -}}
{{- define "kvpressure.words" -}}
{{- $text := include "kvpressure.number" .value -}}
{{- if has .unit (list "ratio" "multiple" "score") -}}
{{- if le (float64 .value) 1.0 -}}
{{- printf "%s %%" (include "kvpressure.number" (mulf .value 100)) -}}
{{- else -}}
{{- printf "%s times" $text -}}
{{- end -}}
{{- else if and (eq .unit "bytes") (eq (mod (int64 .value) 1073741824) 0) -}}
{{- printf "%d GiB" (div (int64 .value) 1073741824) -}}
{{- else if eq .unit "bytes" -}}
{{- printf "%s GB" (include "kvpressure.number" (divf .value 1000000000)) -}}
{{- else if eq .unit "seconds" -}}
{{- include "kvpressure.span" .value -}}
{{- else if eq .unit "count" -}}
{{- $text -}}
{{- else -}}
{{- printf "%s %s" $text (.unit | replace "_" " ") -}}
{{- end -}}
{{- end -}}

{{- /* A generated file with its tokens filled in. Input: root, file. */ -}}
{{- define "kvpressure.filled" -}}
{{- $text := .root.Files.Get .file -}}
{{- range $name := list "runbookBaseUrl" "dashboardBaseUrl" -}}
{{- if not (index $.root.Values.rules $name) -}}
{{- /* Without the address its annotations and links go: an object of a dashboard's list of links, or a line of an alert. */ -}}
{{- $link := printf "\\{(?:[^{}]|\\$\\{[^{}]*\\})*\"url\":\"@@u:%s@@(?:[^{}]|\\$\\{[^{}]*\\})*\\}" $name -}}
{{- $text = regexReplaceAll (printf "(?:,%s)|(?:%s,?)" $link $link) $text "" -}}
{{- $line := printf "\"[a-z_]+\": \"@@u:%s@@[^\"]*\"" $name -}}
{{- $text = regexReplaceAll (printf "(?:,\\s*%s)|(?:%s,?)" $line $line) $text "" -}}
{{- end -}}
{{- end -}}
{{- $known := .root.Files.Get "files/thresholds.json" | fromJson -}}
{{- $overrides := .root.Values.thresholds -}}
{{- $links := .root.Values.rules -}}
{{- range $token := regexFindAll "\"?@@[a-z]:[a-zA-Z0-9_]+@@\"?" $text -1 | uniq -}}
{{- $bare := trimAll "\"" $token -}}
{{- $kind := substr 2 3 $bare -}}
{{- $name := $bare | trimSuffix "@@" | substr 4 -1 -}}
{{- if eq $kind "u" -}}
{{- $text = replace $bare (index $links $name | trimSuffix "/") $text -}}
{{- else -}}
{{- $entry := index $known $name -}}
{{- $value := $entry.value -}}
{{- if hasKey $overrides $name -}}{{- $value = index $overrides $name -}}{{- end -}}
{{- if eq $kind "n" -}}
{{- $text = replace (printf "%q" $bare) (include "kvpressure.number" $value) $text -}}
{{- else if eq $kind "t" -}}
{{- $text = replace $bare (include "kvpressure.number" $value) $text -}}
{{- else if eq $kind "d" -}}
{{- $text = replace $bare (include "kvpressure.duration" $value) $text -}}
{{- else if eq $kind "o" -}}
{{- $text = replace $bare (ternary "configured" "documented" (hasKey $overrides $name)) $text -}}
{{- else -}}
{{- $text = replace $bare (include "kvpressure.words" (dict "value" $value "unit" $entry.unit)) $text -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $text -}}
{{- end -}}

{{- /* The rule groups of .Values.rules as YAML: groups. */ -}}
{{- define "kvpressure.rules" -}}
{{- $wanted := .Values.rules -}}
{{- $document := include "kvpressure.filled" (dict "root" . "file" (printf "files/rules-%s.json" $wanted.profile)) | fromJson -}}
{{- $groups := list -}}
{{- range $group := $document.groups -}}
{{- $rules := list -}}
{{- range $rule := $group.rules -}}
{{- if not (hasKey $rule "alert") -}}
{{- $rules = append $rules $rule -}}
{{- else if not (or (has $rule.alert $wanted.exclude) (has $rule.labels.kvpressure_family $wanted.exclude)) -}}
{{- $for := index (default dict (index $wanted.durations $rule.alert)) $rule.labels.severity -}}
{{- if $for -}}
{{- $_ := set $rule "for" $for -}}
{{- if regexMatch "^0+[smhd]$" $for -}}{{- $_ := unset $rule "for" -}}{{- end -}}
{{- end -}}
{{- $labels := mergeOverwrite (deepCopy $rule.labels) $wanted.labels (default dict (index $wanted.alertLabels $rule.alert)) -}}
{{- $_ := set $rule "labels" $labels -}}
{{- $rules = append $rules $rule -}}
{{- end -}}
{{- end -}}
{{- if $rules -}}
{{- $_ := set $group "rules" $rules -}}
{{- $groups = append $groups $group -}}
{{- end -}}
{{- end -}}
{{- toYaml (dict "groups" $groups) -}}
{{- end -}}
