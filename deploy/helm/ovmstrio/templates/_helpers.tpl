{{- /* A name of a Service: no dots, and a letter first. */}}
{{- define "ovmstrio.name" -}}
{{- $name := .Release.Name | replace "." "-" }}
{{- if not (contains .Chart.Name $name) }}{{ $name = printf "%s-%s" $name .Chart.Name }}{{ end }}
{{- if regexMatch "^[0-9]" $name }}{{ $name = printf "ovms-%s" $name }}{{ end }}
{{- $name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "ovmstrio.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "ovmstrio.labels" -}}
{{ include "ovmstrio.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "ovmstrio.probe" -}}
port: {{ if .Values.tlsSecret }}probes{{ else }}rest{{ end }}
{{- end }}
