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

{{/* A version as the value of a label: build metadata has a plus sign, which labels do not allow. */}}
{{- define "tidemark.labelValue" -}}
{{- regexReplaceAll "[^A-Za-z0-9]+$" (. | replace "+" "_" | trunc 63) "" -}}
{{- end -}}

{{/*
The labels of an object: (dict "root" $ "component" "pipeline" "labels" .Values.pipeline.podLabels). The chart's own labels win
over `labels`, which win over commonLabels.
*/}}
{{- define "tidemark.labels" -}}
{{- $own := dict
  "app.kubernetes.io/version" (include "tidemark.labelValue" .root.Chart.AppVersion)
  "app.kubernetes.io/part-of" "tidemark"
  "app.kubernetes.io/managed-by" .root.Release.Service
  "helm.sh/chart" (include "tidemark.labelValue" (printf "%s-%s" .root.Chart.Name .root.Chart.Version)) -}}
{{- $selector := include "tidemark.selectorLabels" . | fromYaml -}}
{{- toYaml (merge (dict) $selector $own (.labels | default dict) .root.Values.commonLabels) -}}
{{- end -}}

{{/* A number, a boolean or a text as text. A number of a values file is a float, which prints as 1e+06. */}}
{{- define "tidemark.text" -}}
{{- kindIs "string" . | ternary . (toJson .) -}}
{{- end -}}

{{/*
The metadata of an object: (dict "root" $ "component" "pipeline" "suffix" "-pipeline"). `name` instead of `suffix` is the
whole name; `namespace`, `labels` and `annotations` are the object's own, and win over the common ones. `cluster`: the object has
no namespace.
*/}}
{{- define "tidemark.metadata" -}}
name: {{ .name | default (print (include "tidemark.fullname" .root) (default "" .suffix)) }}
{{- if not .cluster }}
namespace: {{ .namespace | default .root.Release.Namespace }}
{{- end }}
labels:
  {{- include "tidemark.labels" . | nindent 2 }}
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

{{/* Address families of a Service, as part of its spec. */}}
{{- define "tidemark.families" -}}
{{- with .Values.network.ipFamilyPolicy }}
ipFamilyPolicy: {{ . }}
{{- end }}
{{- with .Values.network.ipFamilies }}
ipFamilies: {{ toJson . }}
{{- end }}
{{- end -}}

{{/* An address to listen on: (dict "root" $ "port" 9464) */}}
{{- define "tidemark.listen" -}}
{{- $host := .root.Values.network.listen -}}
{{- printf "%s:%d" (contains ":" $host | ternary (printf "[%s]" $host) $host) (int .port) -}}
{{- end -}}

{{- define "tidemark.image" -}}
{{- include "tidemark.imageOf" (dict "root" . "image" .Values.image) -}}
{{- end -}}

{{/* Of whatever needs no Spark. */}}
{{- define "tidemark.servicesImage" -}}
{{- include "tidemark.imageOf" (dict "root" . "image" (ternary .Values.image .Values.servicesImage (empty .Values.servicesImage.repository))) -}}
{{- end -}}

{{/* The whole name of an image: (dict "root" $ "image" .Values.image). global.imageRegistry wins over the registry of `image`. */}}
{{- define "tidemark.imageOf" -}}
{{- with .root.Values.global.imageRegistry | default .image.registry -}}{{ trimSuffix "/" . }}/{{- end -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion | toString | replace "+" "_" }}
{{- end -}}
{{- end -}}

{{/* imagePullSecrets of a pod: those of the image and the global ones, each a name or an object with a name. */}}
{{- define "tidemark.pullSecrets" -}}
{{- $names := list -}}
{{- range concat .Values.image.pullSecrets .Values.global.imagePullSecrets -}}
{{- $names = append $names (kindIs "string" . | ternary . (get (kindIs "map" . | ternary . (dict)) "name")) -}}
{{- end -}}
{{- range uniq $names }}
- name: {{ . }}
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
