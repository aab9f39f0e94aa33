{{/*
A `--config` file: TOML with sorted keys, each in one line.  src/penstock/deploy/settings_file.py has the same rules, so
that pods are the same, with the same hash of their settings, whoever makes them.
*/}}
{{- define "penstock.settings" -}}
{{- $settings := . -}}
{{- range $key := keys $settings | sortAlpha -}}
{{ include "penstock.tomlKey" $key }} = {{ include "penstock.tomlValue" (get $settings $key) }}
{{ end -}}
{{- end }}

{{- define "penstock.tomlKey" -}}
{{- if regexMatch "^[A-Za-z0-9_-]+$" . }}{{ . }}{{ else }}{{ include "penstock.tomlValue" . }}{{ end -}}
{{- end }}

{{- define "penstock.tomlValue" -}}
{{- $value := . -}}
{{- $items := list -}}
{{- if kindIs "map" $value -}}
{{- range $key := keys $value | sortAlpha -}}
{{- $item := get $value $key -}}
{{- if not (kindIs "invalid" $item) -}}
{{- $items = append $items (printf "%s = %s" (include "penstock.tomlKey" $key) (include "penstock.tomlValue" $item)) -}}
{{- end -}}
{{- end -}}
{{- printf "{%s}" (join ", " $items) -}}
{{- else if kindIs "slice" $value -}}
{{- range $value -}}
{{- $items = append $items (include "penstock.tomlValue" .) -}}
{{- end -}}
{{- printf "[%s]" (join ", " $items) -}}
{{- else -}}
{{- toRawJson $value | replace "\x7f" "\\u007f" -}}
{{- end -}}
{{- end }}
