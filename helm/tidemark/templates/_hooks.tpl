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
# Longer than the container runs, 60 s for the image and 90 s for Secrets included, and shorter than helm waits: a Job that reaches its
# deadline loses its pod and its log.
activeDeadlineSeconds: {{ add .root.Values.migrations.timeoutSeconds 150 }}
# The container itself waits for a server that does not answer. Its failure is final.
backoffLimit: 2
podFailurePolicy:
  rules:
    - action: FailJob
      onExitCodes: {containerName: {{ .container }}, operator: In, values: [1, 2]}
    # A drained node is no failure of the container.
    - action: Ignore
      onPodConditions: [{type: DisruptionTarget, status: "True"}]
# helm uninstall does not delete hooks.
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
  {{- include "tidemark.labels" (merge (dict "labels" .root.Values.hooks.podLabels) .) | nindent 2 }}
{{- with .root.Values.hooks.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
