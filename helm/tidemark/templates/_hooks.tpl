{{/* Hooks run before the release's own objects exist, the service account included. */}}

{{/* (dict "root" $ "component" "migrations" "weight" 0) */}}
{{- define "tidemark.hookMetadata" -}}
{{- /* One that failed stays until the next try, and helm shows its log. */ -}}
{{ include "tidemark.metadata" (merge (dict "suffix" (print "-" .component) "annotations" (dict
  "helm.sh/hook" "pre-install,pre-upgrade"
  "helm.sh/hook-weight" (toString .weight)
  "helm.sh/hook-delete-policy" "before-hook-creation,hook-succeeded"
  "helm.sh/hook-output-log-policy" "hook-failed")) .) }}
{{- end -}}

{{/* The beginning of a hook Job's spec: (dict "root" $ "container" "migrate"), the container that does the work. */}}
{{- define "tidemark.hookJob" -}}
# Longer than the container tries, an image to be pulled included, and shorter than helm waits: a Job that reaches it loses
# its pod, and with that its log.
activeDeadlineSeconds: {{ add .root.Values.migrations.timeoutSeconds 120 }}
# It tries by itself for as long as a server does not answer; what it says then is final.
backoffLimit: 2
podFailurePolicy:
  rules:
    - action: FailJob
      onExitCodes: {containerName: {{ .container }}, operator: In, values: [1, 2]}
    # A node that is drained says nothing of the migration.
    - action: Ignore
      onPodConditions: [{type: DisruptionTarget}]
# An uninstall does not know it.
ttlSecondsAfterFinished: 86400
{{- end -}}

{{/* The beginning of a hook pod's spec. */}}
{{- define "tidemark.hookPodBasics" -}}
automountServiceAccountToken: false
enableServiceLinks: false
restartPolicy: Never
{{- with .Values.hooks.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{ include "tidemark.podPlace" (dict "root" . "of" .Values.hooks) }}
{{- end -}}

{{/* A hook pod's metadata: (dict "root" $ "component" "migrations") */}}
{{- define "tidemark.hookPodMetadata" -}}
labels:
  {{- include "tidemark.labels" . | nindent 2 }}
  {{- with .root.Values.hooks.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .root.Values.hooks.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
