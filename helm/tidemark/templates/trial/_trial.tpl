{{/* The parts that the trial's three servers share: (dict "root" $ "server" "redis" "port" 6379 "user" 999) */}}

{{- define "tidemark.trial.service" -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "tidemark.metadata" (dict "root" .root "component" (print "trial-" .server) "suffix" (print "-" .server)) | nindent 2 }}
spec:
  clusterIP: None
  {{- include "tidemark.families" .root | nindent 2 }}
  # Kafka must reach itself by this name before it is ready.
  publishNotReadyAddresses: true
  selector:
    {{- include "tidemark.selectorLabels" (dict "root" .root "component" (print "trial-" .server)) | nindent 4 }}
  ports:
    - name: {{ .server }}
      port: {{ .port }}
      targetPort: {{ .server }}
{{- end -}}

{{/* The StatefulSet up to its container's own lines. */}}
{{- define "tidemark.trial.statefulset" -}}
{{- $labels := dict "root" .root "component" (print "trial-" .server) -}}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  {{- /* The official images know these users, and not ours. */}}
  {{- include "tidemark.metadata" (merge (dict "suffix" (print "-" .server)
    "annotations" (dict "kube-score/ignore" "container-security-context-user-group-id")) $labels) | nindent 2 }}
spec:
  replicas: 1
  serviceName: {{ include "tidemark.fullname" .root }}-{{ .server }}
  selector:
    matchLabels:
      {{- include "tidemark.selectorLabels" $labels | nindent 6 }}
  template:
    metadata:
      labels:
        {{- /* Without versions: an upgrade of the chart would start the servers again, and their data would be gone. */}}
        {{- toYaml (merge (dict) (include "tidemark.selectorLabels" $labels | fromYaml) .root.Values.commonLabels) | nindent 8 }}
    spec:
      automountServiceAccountToken: false
      enableServiceLinks: false
      terminationGracePeriodSeconds: 10
      {{- with include "tidemark.pullSecrets" .root }}
      imagePullSecrets:
        {{- . | nindent 8 }}
      {{- end }}
      securityContext:
        runAsNonRoot: true
        runAsUser: {{ .user }}
        runAsGroup: {{ .user }}
        fsGroup: {{ .user }}
        seccompProfile:
          type: RuntimeDefault
      volumes:
        - name: data
          emptyDir: {}
        - name: tmp
          emptyDir: {}
        {{- with .volumes }}
        {{- . | nindent 8 }}
        {{- end }}
      containers:
        - name: {{ .server }}
          image: {{ include "tidemark.imageOf" (dict "root" .root "image" (index .root.Values.trial .server).image) }}
          imagePullPolicy: IfNotPresent
          command: [sh, -euc]
          args:
            - |
              {{- .script | nindent 14 }}
          {{- with .env }}
          env:
            {{- . | nindent 12 }}
          {{- end }}
          ports:
            - name: {{ .server }}
              containerPort: {{ .port }}
          startupProbe:
            tcpSocket: {port: {{ .server }}}
            periodSeconds: 1
            failureThreshold: 120
          readinessProbe:
            tcpSocket: {port: {{ .server }}}
          resources:
            {{- toYaml .root.Values.trial.resources | nindent 12 }}
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            runAsNonRoot: true
            runAsUser: {{ .user }}
            runAsGroup: {{ .user }}
            capabilities:
              drop: [ALL]
            seccompProfile:
              type: RuntimeDefault
          volumeMounts:
            - name: data
              mountPath: /data
            - name: tmp
              mountPath: /tmp
            {{- with .mounts }}
            {{- . | nindent 12 }}
            {{- end }}
{{- end -}}

{{- define "tidemark.trial.kafkaScript" -}}
cat >/data/server.properties <<END
process.roles=broker,controller
node.id=1
listeners=PLAINTEXT://:9092,CONTROLLER://127.0.0.1:9093
advertised.listeners=PLAINTEXT://{{ include "tidemark.fullname" . }}-kafka:9092
controller.listener.names=CONTROLLER
controller.quorum.bootstrap.servers=127.0.0.1:9093
log.dirs=/data/logs
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
END
[ -e /data/logs/meta.properties ] \
  || /opt/kafka/bin/kafka-storage.sh format --standalone -t VGlkZW1hcmtUcmlhbEtmaw -c /data/server.properties
exec /opt/kafka/bin/kafka-server-start.sh /data/server.properties
{{- end -}}

{{- define "tidemark.trial.postgresScript" -}}
# A cluster that was cut short looks finished to Postgres: it is moved to its place when it is whole.
if [ ! -e /data/cluster ]; then
  rm -rf /data/new
  initdb -D /data/new -U postgres --pwfile=/etc/tidemark/trial/password --auth=scram-sha-256 --encoding=UTF8 --no-locale
  echo 'host all all all scram-sha-256' >>/data/new/pg_hba.conf
  echo 'create database tidemark' | postgres --single -D /data/new postgres
  mv /data/new /data/cluster
fi
exec postgres -D /data/cluster -c listen_addresses='*' -c unix_socket_directories=/tmp
{{- end -}}
