{{/* What all pods have in common. */}}

{{- define "tidemark.podSecurity" -}}
{{- $own := dict -}}
{{- range $name, $value := .Values.podSecurityContext -}}
{{- if not (kindIs "invalid" $value) -}}{{- $_ := set $own $name $value -}}{{- end -}}
{{- end -}}
{{- toYaml $own -}}
{{- end -}}

{{- define "tidemark.containerSecurity" -}}
{{- toYaml (merge (dict) .Values.securityContext (pick (include "tidemark.podSecurity" . | fromYaml) "runAsNonRoot" "runAsUser" "runAsGroup" "seccompProfile")) -}}
{{- end -}}

{{/* The beginning of a pod's spec: (dict "root" $ "token" false "of" .Values.pipeline) */}}
{{- define "tidemark.podBasics" -}}
serviceAccountName: {{ include "tidemark.serviceAccountName" .root }}
automountServiceAccountToken: {{ .token }}
enableServiceLinks: false
{{- include "tidemark.podPlace" . | nindent 0 }}
{{- end -}}

{{/* Where a pod runs, as `.of` says, and what lets it: (dict "root" $ "of" .Values.hooks) */}}
{{- define "tidemark.podPlace" -}}
securityContext:
  {{- include "tidemark.podSecurity" .root | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- range $name := list "nodeSelector" "tolerations" "affinity" "dnsConfig" }}
{{- with get $.of $name }}
{{ $name }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The beginning of a container that needs Spark, and of one that does not. */}}
{{- define "tidemark.sparkContainer" -}}
image: {{ include "tidemark.image" . }}
{{ include "tidemark.containerBasics" . }}
{{- end -}}

{{- define "tidemark.serviceContainer" -}}
image: {{ include "tidemark.servicesImage" . }}
{{ include "tidemark.containerBasics" . }}
{{- end -}}

{{- define "tidemark.containerBasics" -}}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  {{- include "tidemark.containerSecurity" . | nindent 2 }}
{{- end -}}
