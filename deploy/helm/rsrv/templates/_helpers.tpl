{{- define "rsrv.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 52 | trimSuffix "-" -}}
{{- end }}

{{- define "rsrv.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else if contains (include "rsrv.name" .) .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "rsrv.name" .) | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{/* Which pods: call with (dict "root" $ "component" "server"). */}}
{{- define "rsrv.selector" -}}
app.kubernetes.io/name: {{ include "rsrv.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "rsrv.labels" -}}
{{ include "rsrv.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "rsrv.serviceAccount" -}}
{{- default (include "rsrv.fullname" .) .Values.serviceAccount.name -}}
{{- end }}

{{/* What a restricted API of Triton's wants to see, with the value that is in the Secret. */}}
{{- define "rsrv.restrictKey" -}}
rsrv-key
{{- end }}

{{- define "rsrv.restrictSecret" -}}
{{- default (printf "%s-restrict" (include "rsrv.fullname" .)) .Values.restrict.existingSecret -}}
{{- end }}

{{- define "rsrv.tokenSecret" -}}
{{- default (printf "%s-control" (include "rsrv.fullname" .)) .Values.gateway.existingSecret -}}
{{- end }}

{{- define "rsrv.workersName" -}}
{{- printf "%s-workers.%s.svc.%s" (include "rsrv.fullname" .) .Release.Namespace .Values.clusterDomain -}}
{{- end }}

{{/* A secret of the chart's own: what it was, if it is there; else a new one, the same wherever this rendering asks for it. */}}
{{- define "rsrv.secretValue" -}}
{{- $old := lookup "v1" "Secret" .root.Release.Namespace .name -}}
{{- $new := get .root.Values "newSecrets" | default dict -}}
{{- if $old -}}
{{- index $old.data .entry -}}
{{- else -}}
{{- if not (hasKey $new .name) -}}
{{- $_ := set $new .name (randAlphaNum 32 | b64enc) -}}
{{- $_ := set .root.Values "newSecrets" $new -}}
{{- end -}}
{{- get $new .name -}}
{{- end -}}
{{- end }}

{{- define "rsrv.restrictValue" -}}
{{- include "rsrv.secretValue" (dict "root" . "name" (include "rsrv.restrictSecret" .) "entry" "key") -}}
{{- end }}

{{- define "rsrv.tokenValue" -}}
{{- include "rsrv.secretValue" (dict "root" . "name" (include "rsrv.tokenSecret" .) "entry" "token") -}}
{{- end }}

{{/* Annotations by which pods are replaced when a Secret changes. Of one that is not the chart's it cannot know that. */}}
{{- define "rsrv.secretChecksums" -}}
{{- if not .Values.restrict.existingSecret }}
checksum/restrict: {{ include "rsrv.restrictValue" . | sha256sum }}
{{- end }}
{{- if and .Values.gateway.enabled (not .Values.gateway.existingSecret) }}
checksum/control: {{ include "rsrv.tokenValue" . | sha256sum }}
{{- end }}
{{- end }}

{{/* Bytes of a Kubernetes quantity. */}}
{{- define "rsrv.bytes" -}}
{{- $text := toString . -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mul (regexFind "^[0-9]+" $text | int64) (get $units (regexFind "[A-Za-z]*$" $text) | int64) -}}
{{- end }}

{{- define "rsrv.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
# Not for every file at every start; and rsrv refuses a cache that is open to a group.
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "rsrv.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* How long requests wait on average, over all pods; 0 while there are none. Only rsrv's own page has this histogram. */}}
{{- define "rsrv.queueWait" -}}
{{- $pods := printf "namespace=%q,pod=~%q" .Release.Namespace (printf "%s-server-.+" (include "rsrv.fullname" .)) -}}
sum(rate(rsrv_queue_wait_seconds_sum{ {{- $pods -}} }[1m])) / (sum(rate(rsrv_queue_wait_seconds_count{ {{- $pods -}} }[1m])) > 0) or vector(0)
{{- end }}

{{/* How many requests wait. */}}
{{- define "rsrv.queueDepth" -}}
sum(rsrv_queue_depth{namespace={{ .Release.Namespace | quote }},pod=~"{{ include "rsrv.fullname" . }}-server-.+"})
{{- end }}
