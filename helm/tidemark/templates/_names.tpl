{{/* What things are called, and the labels by which they are found. */}}

{{- define "tidemark.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "tidemark.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "tidemark.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "tidemark.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "component" "pipeline") */}}
{{- define "tidemark.selectorLabels" -}}
app.kubernetes.io/name: {{ include "tidemark.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* (dict "root" $ "component" "pipeline") */}}
{{- define "tidemark.labels" -}}
{{ include "tidemark.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: tidemark
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/*
The metadata of an object: (dict "root" $ "component" "pipeline" "suffix" "-pipeline"). `name` instead of `suffix` is the
whole name; `namespace`, `labels` and `annotations` are the object's own, and win over the common ones.
*/}}
{{- define "tidemark.metadata" -}}
name: {{ .name | default (print (include "tidemark.fullname" .root) (default "" .suffix)) }}
namespace: {{ .namespace | default .root.Release.Namespace }}
labels:
  {{- include "tidemark.labels" . | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Every pod that serves positions, the pipeline's included: what the one Service selects. */}}
{{- define "tidemark.servesLabels" -}}
app.kubernetes.io/name: {{ include "tidemark.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
tidemark/serves: positions
{{- end -}}

{{- define "tidemark.image" -}}
{{- include "tidemark.imageOf" (dict "root" . "image" .Values.image) -}}
{{- end -}}

{{/* Of whatever needs no Spark. */}}
{{- define "tidemark.servicesImage" -}}
{{- include "tidemark.imageOf" (dict "root" . "image" (ternary .Values.image .Values.servicesImage (empty .Values.servicesImage.repository))) -}}
{{- end -}}

{{- define "tidemark.imageOf" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "tidemark.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (include "tidemark.fullname" .) -}}
{{- end -}}

{{/* The pipeline's stable name in the network, for executors that call their driver. */}}
{{- define "tidemark.driverHost" -}}
{{- printf "%s-pipeline-0.%s-pipeline.%s.svc" (include "tidemark.fullname" .) (include "tidemark.fullname" .) .Release.Namespace -}}
{{- end -}}

{{/* An amount of memory, of Kubernetes or of Java, in MiB; empty where it is written in another way. */}}
{{- define "tidemark.mebibytes" -}}
{{- $units := dict "k" 0.0009765625 "m" 1.0 "g" 1024.0 "t" 1048576.0 -}}
{{- $found := regexFind "^[0-9.]+[kmgtKMGT]i?$" (toString .) -}}
{{- if $found -}}
{{- $unit := trimSuffix "i" $found | lower | trimAll "0123456789." -}}
{{- mulf (float64 (trimAll "kmgtKMGTi" $found)) (get $units $unit) | int64 -}}
{{- end -}}
{{- end -}}
