{{/* Where Spark runs: settings of the driver, and the pod that executors are made after. */}}

{{- define "tidemark.spark.needsFiles" -}}
{{- if or .Values.spark.conf (ne .Values.spark.master "local") -}}yes{{- end -}}
{{- end -}}

{{/* Entries of the pipeline's `env`. */}}
{{- define "tidemark.spark.env" -}}
{{- $executor := .Values.spark.executor -}}
- name: TIDEMARK_SPARK_MASTER
  value: {{ ternary "k8s://https://kubernetes.default.svc" .Values.spark.master (eq .Values.spark.master "kubernetes") }}
{{- if include "tidemark.spark.needsFiles" . }}
- name: TIDEMARK_SPARK_CONF_FILE
  value: /etc/tidemark/spark/spark.conf
{{- end }}
{{- if ne .Values.spark.master "local" }}
- name: TIDEMARK_SPARK_DRIVER_HOST
  value: {{ include "tidemark.driverHost" . }}
- name: TIDEMARK_SPARK_DRIVER_PORT
  value: "7078"
- name: TIDEMARK_SPARK_BLOCK_MANAGER_PORT
  value: "7079"
- name: TIDEMARK_SPARK_EXECUTORS
  value: {{ include "tidemark.text" $executor.instances | quote }}
{{- with $executor.maxInstances }}
- name: TIDEMARK_SPARK_EXECUTORS_MAX
  value: {{ include "tidemark.text" . | quote }}
{{- end }}
- name: TIDEMARK_SPARK_EXECUTOR_CORES
  value: {{ include "tidemark.text" $executor.cores | quote }}
- name: TIDEMARK_SPARK_EXECUTOR_MEMORY
  value: {{ $executor.memory }}
{{- with $executor.python }}
- name: TIDEMARK_SPARK_EXECUTOR_PYTHON
  value: {{ . }}
{{- end }}
{{- end }}
{{- if eq .Values.spark.master "kubernetes" }}
- name: TIDEMARK_SPARK_KUBERNETES_IMAGE
  value: {{ include "tidemark.image" . }}
- name: TIDEMARK_SPARK_KUBERNETES_NAMESPACE
  value: {{ .Release.Namespace }}
- name: TIDEMARK_SPARK_KUBERNETES_SERVICE_ACCOUNT
  value: {{ include "tidemark.serviceAccountName" . }}
- name: TIDEMARK_SPARK_KUBERNETES_EXECUTOR_TEMPLATE
  value: /etc/tidemark/spark/executor.yaml
- name: TIDEMARK_SPARK_KUBERNETES_DRIVER_POD
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
{{- end }}
{{- end -}}

{{/* What has no setting of Tidemark's, then the user's own, which win. */}}
{{- define "tidemark.spark.properties" -}}
{{- $executor := .Values.spark.executor -}}
{{- $own := dict -}}
{{- if ne .Values.spark.master "local" -}}
{{- $_ := set $own "spark.executor.memoryOverhead" $executor.memoryOverhead -}}
{{- end -}}
{{- if eq .Values.spark.master "kubernetes" -}}
{{- $_ := set $own "spark.kubernetes.container.image.pullPolicy" .Values.image.pullPolicy -}}
{{- $_ := set $own "spark.kubernetes.executor.podTemplateContainerName" "executor" -}}
{{- /* The role allows pods only: no ConfigMap for each executor, no claims and no Service of Spark's. */ -}}
{{- $_ := set $own "spark.kubernetes.executor.disableConfigMap" "true" -}}
{{- $_ := set $own "spark.kubernetes.driver.ownPersistentVolumeClaim" "false" -}}
{{- $_ := set $own "spark.kubernetes.driver.reusePersistentVolumeClaim" "false" -}}
{{- $_ := set $own "spark.kubernetes.driver.service.deleteOnTermination" "false" -}}
{{- $_ := set $own "spark.kubernetes.executor.limit.cores" (include "tidemark.text" $executor.cores) -}}
{{- end -}}
{{- range $name, $value := merge (dict) .Values.spark.conf $own }}
{{ $name }} {{ $value }}
{{- end }}
{{- end -}}

{{/* Spark adds image, size, addresses and its own variables to it; certificates travel with the query. */}}
{{- define "tidemark.spark.executorTemplate" -}}
apiVersion: v1
kind: Pod
metadata:
  labels:
    {{- include "tidemark.labels" (dict "root" . "component" "executor") | nindent 4 }}
spec:
  {{- include "tidemark.podBasics" (dict "root" . "of" .Values.spark.executor) | nindent 2 }}
  containers:
    - name: executor
      # Spark says `executor` as the argument.
      command: [tini, --, tidemark-executor]
      securityContext:
        {{- include "tidemark.containerSecurity" . | nindent 8 }}
      volumeMounts:
        - name: scratch
          mountPath: /var/lib/tidemark
        - name: tmp
          mountPath: /tmp
  volumes:
    - name: scratch
      emptyDir:
        sizeLimit: {{ include "tidemark.text" .Values.spark.executor.scratchSize }}
    - name: tmp
      emptyDir:
        sizeLimit: 256Mi
{{- end -}}
