{{/* Hooks run before the release's own objects exist, the service account included: they use the namespace's default. */}}

{{/* (dict "root" $ "component" "migrations" "weight" 0) */}}
{{- define "tidemark.hookMetadata" -}}
name: {{ include "tidemark.fullname" .root }}-{{ .component }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "tidemark.labels" . | nindent 2 }}
annotations:
  helm.sh/hook: pre-install,pre-upgrade
  helm.sh/hook-weight: {{ .weight | quote }}
  # One that failed stays, with its log, until the next try.
  helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}

{{/* The beginning of a hook pod's spec. */}}
{{- define "tidemark.hookPodBasics" -}}
automountServiceAccountToken: false
enableServiceLinks: false
restartPolicy: OnFailure
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  {{- include "tidemark.podSecurity" . | nindent 2 }}
{{- end -}}
