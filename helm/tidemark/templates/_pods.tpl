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

{{/* The beginning of a pod's spec: (dict "root" $ "of" .Values.pipeline). No container gets an API token by itself. */}}
{{- define "tidemark.podBasics" -}}
serviceAccountName: {{ include "tidemark.serviceAccountName" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- include "tidemark.podPlace" . | nindent 0 }}
{{- end -}}

{{/* Where a pod runs, as `.of` says, and what lets it: (dict "root" $ "of" .Values.hooks) */}}
{{- define "tidemark.podPlace" -}}
securityContext:
  {{- include "tidemark.podSecurity" .root | nindent 2 }}
{{- with include "tidemark.pullSecrets" .root }}
imagePullSecrets:
  {{- . | nindent 2 }}
{{- end }}
{{- with .of.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .of.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- if and (kindIs "bool" .of.hostUsers) (not .of.hostUsers) }}
hostUsers: false
{{- end }}
{{- range $name := list "hostAliases" "nodeSelector" "tolerations" "affinity" "dnsConfig" }}
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
