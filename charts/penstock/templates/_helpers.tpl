{{/*
The fleet's name as names of resources have it: of the fleet file, or of the release.
*/}}
{{- define "penstock.name" -}}
{{- $given := default .Release.Name .Values.name -}}
{{- $plain := regexReplaceAll "[^a-z0-9]+" (lower $given) "-" | trimAll "-" | trunc 40 | trimSuffix "-" -}}
{{- if not (regexMatch "^[a-z]" $plain) -}}
{{- fail (printf "name = %q: resources are named after it, so it must begin with a letter" $given) -}}
{{- end -}}
{{- $plain -}}
{{- end }}

{{/*
Labels of all resources of the fleet, or of one component.  Takes root and component.
*/}}
{{- define "penstock.labels" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ include "penstock.name" .root | quote }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{/*
Metadata of a resource.  Takes root, name, and maybe component.
*/}}
{{- define "penstock.metadata" -}}
name: {{ .name | quote }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "penstock.labels" . | nindent 2 }}
{{- end }}

{{- define "penstock.image" -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end }}

{{/*
The name of the Secret.  Takes root and secret.
*/}}
{{- define "penstock.secretName" -}}
{{- printf "%s-%s" (include "penstock.name" .root) .secret -}}
{{- end }}

{{/*
Labels by which gateways, or workers, are selected.
*/}}
{{- define "penstock.gatewaySelector" -}}
matchLabels:
  {{- include "penstock.labels" (dict "root" . "component" "gateway") | nindent 2 }}
{{- end }}

{{- define "penstock.workerSelector" -}}
matchLabels:
  {{- include "penstock.labels" (dict "root" .) | nindent 2 }}
matchExpressions:
  - key: app.kubernetes.io/component
    operator: In
    values: [prefill, decode, both, encode]
{{- end }}

{{/*
"true" if there is an endpoint picker that listens with TLS, which is the default.  A picker without options is an empty
table, which templates take for none, so its kind is asked for.
*/}}
{{- define "penstock.pickerTls" -}}
{{- $picker := .Values.kubernetes.picker -}}
{{- if kindIs "map" $picker -}}{{- dig "tls" true $picker -}}{{- end -}}
{{- end }}

{{/*
What autoscalers scale.  Takes a workload.
*/}}
{{- define "penstock.scaleTarget" -}}
{{- if gt (int .machines) 1 -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else -}}
apiVersion: apps/v1
kind: Deployment
{{- end }}
name: {{ .name | quote }}
{{- end }}
