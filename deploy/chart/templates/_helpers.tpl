{{/* Names, labels, images, and what all pods have in common. */}}

{{- define "quire.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ .Chart.Name }}{{ end -}}
{{- end }}

{{/* Labels by which services and policies find pods: (dict "root" $ "role" "worker"). */}}
{{- define "quire.selector" -}}
app.kubernetes.io/name: quire
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "quire.labels" -}}
{{ include "quire.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* (dict "root" $ "name" "quire-worker") */}}
{{- define "quire.image" -}}
{{- with .root.Values.image.registry }}{{ . }}/{{ end }}{{ .name }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion -}}
{{- end }}

{{/* The secret of a role's certificate: (dict "root" $ "role" "workers"). */}}
{{- define "quire.secret" -}}
{{- index .root.Values.certificates.secrets .role | default (printf "%s-%s" (include "quire.fullname" .root) .role) -}}
{{- end }}

{{- define "quire.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .root.Values.terminationGraceSeconds }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "quire.container" -}}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* What a health check in the container shows: the certificate of the container itself. */}}
{{- define "quire.client" -}}
- {name: QUIRE_TLS_CA, value: /run/quire/ca.crt}
- {name: QUIRE_TLS_CERT, value: /run/quire/tls.crt}
- {name: QUIRE_TLS_KEY, value: /run/quire/tls.key}
{{- end }}

{{/* Probes of a server that asks its callers for a certificate: (dict "port" 7070 "startSeconds" 60). */}}
{{- define "quire.probes" -}}
startupProbe:
  exec: {command: [quire, health, --live, "127.0.0.1:{{ .port }}"]}
  periodSeconds: 5
  timeoutSeconds: 10
  failureThreshold: {{ div (add .startSeconds 4) 5 }}
livenessProbe:
  exec: {command: [quire, health, --live, "127.0.0.1:{{ .port }}"]}
  periodSeconds: 15
  timeoutSeconds: 10
readinessProbe:
  exec: {command: [quire, health, "127.0.0.1:{{ .port }}"]}
  periodSeconds: 10
  timeoutSeconds: 10
{{- end }}

{{- define "quire.serverTls" -}}
- --tls-cert=/run/quire/tls.crt
- --tls-key=/run/quire/tls.key
- --tls-client-ca=/run/quire/ca.crt
{{- end }}

{{/* Calls to the cluster's DNS. */}}
{{- define "quire.names" -}}
- to: [{namespaceSelector: {}}]
  ports: [{protocol: UDP, port: 53}, {protocol: TCP, port: 53}]
{{- end }}
