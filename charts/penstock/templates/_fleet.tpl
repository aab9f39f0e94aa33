{{/*
The fleet as JSON: name, gateways (a workload), workers (workloads), noPathS, ownKeys.  A workload is equal pods:

    name, component, worker, count, mesh, ranks, machines, config (the text of its settings), secrets, written (folders),
    cpu, memory, gpus, graceS, scaled, least

Workers are of one workload if role, group, number of machines and settings are equal.  Fails for what a pod cannot have.
*/}}
{{- define "penstock.fleet" -}}
{{- $root := . -}}
{{- $name := include "penstock.name" $root -}}
{{- $known := $root.Files.Get "files/settings.json" | fromJson -}}
{{- $gateways := 0 -}}
{{- $front := dict -}}
{{- $entries := list -}}
{{- $nodes := dict -}}
{{- $drainS := 0.0 -}}
{{- $noPathS := 0.0 -}}
{{- range $node := required "nodes: a fleet file for the simulator alone has none that could run" $root.Values.nodes -}}
{{- /* The node's settings over the fleet's. */ -}}
{{- $settings := dict -}}
{{- range $table := list $root.Values.settings $node.settings -}}
{{- range $key, $value := $table -}}
{{- if not (kindIs "invalid" $value) -}}
{{- $_ := set $settings (replace "-" "_" $key) $value -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if eq (toString (get $settings "transfer")) "shm" -}}
{{- fail "transfer = \"shm\" moves pages within one host; leave it out" -}}
{{- end -}}
{{- if ne (hasKey $settings "tls_cert") (hasKey $settings "tls_key") -}}
{{- fail (printf "node %s: HTTPS needs a certificate and its key: tls_cert and tls_key" $node.name) -}}
{{- end -}}
{{- $drainS = maxf $drainS (dig "supervise" "drain_s" 30.0 $settings | toString | float64) -}}
{{- $noPathS = maxf $noPathS (dig "failover" "no_path_s" 2.0 $settings | toString | float64) -}}
{{- $ownGateways := $node.gateways | default 0 | toString | int -}}
{{- if $ownGateways -}}
{{- $gateways = add $gateways $ownGateways -}}
{{- $own := include "penstock.settingsOf" (dict "settings" $settings "known" $known.gateway) -}}
{{- if not $front -}}
{{- $front = dict "node" $node.name "text" $own "settings" $settings -}}
{{- else if ne $own $front.text -}}
{{- $keys := include "penstock.differing" (dict "one" $front.settings "other" $settings "known" $known.gateway) -}}
{{- $where := printf "gateways of nodes %s and %s differ in %s" $front.node $node.name $keys -}}
{{- fail (printf "%s; where a scheduler places them all need the same settings: write them into settings" $where) -}}
{{- end -}}
{{- end -}}
{{- $text := include "penstock.settingsOf" (dict "settings" $settings "known" $known.worker) -}}
{{- $_ := set $nodes $node.name (dict "settings" $settings "text" $text) -}}
{{- range $group := $node.workers -}}
{{- $entries = append $entries (dict "group" $group "node" (get $nodes $node.name)) -}}
{{- end -}}
{{- end -}}
{{- range $group := $root.Values.groups -}}
{{- include "penstock.checkGroup" (dict "group" $group "nodes" $nodes "known" $known.worker) -}}
{{- $entries = append $entries (dict "group" $group "node" (get $nodes (first $group.nodes))) -}}
{{- end -}}
{{- $kinds := list -}}
{{- $kindOf := dict -}}
{{- range $entry := $entries -}}
{{- $role := $entry.group.role | default "both" -}}
{{- $sizes := include "penstock.meshSizes" $entry.group | fromJson -}}
{{- $hosts := $entry.group.nodes | default list | len -}}
{{- $key := printf "%s %d %d %d\n%s" $role (int $sizes.tensor) (int $sizes.pipeline) $hosts $entry.node.text -}}
{{- $count := $entry.group.count | default 1 | toString | int -}}
{{- if hasKey $kindOf $key -}}
{{- $kind := get $kindOf $key -}}
{{- $_ := set $kind "count" (add $kind.count $count) -}}
{{- else -}}
{{- $kind := dict "component" $role "count" $count "settings" $entry.node.settings "hosts" $hosts -}}
{{- $kind = merge $kind $sizes -}}
{{- $_ := set $kindOf $key $kind -}}
{{- $kinds = append $kinds $kind -}}
{{- end -}}
{{- end -}}
{{- if not $front -}}{{- fail "no node has gateways; add gateways: 1 to one" -}}{{- end -}}
{{- if not $kinds -}}{{- fail "no node has workers" -}}{{- end -}}
{{- $common := dict "root" $root "drainS" $drainS -}}
{{- $mine := dict "name" (printf "%s-gateway" $name) "component" "gateway" "worker" false "known" $known.gateway -}}
{{- $mine = merge $mine $common (dict "count" $gateways "settings" $front.settings "tensor" 1 "pipeline" 1 "hosts" 0) -}}
{{- $gateway := include "penstock.workload" $mine | fromJson -}}
{{- $workers := list -}}
{{- $taken := dict -}}
{{- range $kind := $kinds -}}
{{- $_ := set $kind "name" (include "penstock.kindName" (dict "fleet" $name "kind" $kind "kinds" $kinds "taken" $taken)) -}}
{{- $_ := set $taken $kind.name true -}}
{{- $mine := merge (dict "worker" true "known" $known.worker) $common $kind -}}
{{- $workers = append $workers (include "penstock.workload" $mine | fromJson) -}}
{{- end -}}
{{- $ownKeys := has "api-keys" $gateway.secrets -}}
{{- dict "name" $name "gateways" $gateway "workers" $workers "noPathS" $noPathS "ownKeys" $ownKeys | toJson -}}
{{- end }}

{{/*
Those of the settings that are known, as text.  Takes settings and known.
*/}}
{{- define "penstock.settingsOf" -}}
{{- $settings := .settings -}}
{{- $own := dict -}}
{{- range $key := .known -}}
{{- if hasKey $settings $key -}}
{{- $_ := set $own $key (get $settings $key) -}}
{{- end -}}
{{- end -}}
{{- include "penstock.settings" $own -}}
{{- end }}

{{/*
Those of the known settings in which two nodes differ, as "kv_memory, threads".  Takes one, other (settings) and known.
*/}}
{{- define "penstock.differing" -}}
{{- $one := .one -}}
{{- $other := .other -}}
{{- $keys := list -}}
{{- range $key := .known -}}
{{- $text := include "penstock.settingsOf" (dict "settings" $one "known" (list $key)) -}}
{{- if ne $text (include "penstock.settingsOf" (dict "settings" $other "known" (list $key))) -}}
{{- $keys = append $keys $key -}}
{{- end -}}
{{- end -}}
{{- join ", " $keys -}}
{{- end }}

{{/*
Fails for a group over several nodes that cannot be.  Takes group, nodes (by name, each with settings and text) and known.
*/}}
{{- define "penstock.checkGroup" -}}
{{- $names := .group.nodes -}}
{{- $nodes := .nodes -}}
{{- $where := printf "groups: the group on nodes %s" (join ", " $names) -}}
{{- range $names -}}
{{- if not (hasKey $nodes .) -}}{{- fail (printf "%s: there is no node %s" $where .) -}}{{- end -}}
{{- end -}}
{{- if ne (len $names) (len (uniq $names)) -}}
{{- fail (printf "%s: one is listed twice; a node has all of its stages together" $where) -}}
{{- end -}}
{{- $role := .group.role | default "both" -}}
{{- if ne $role "both" -}}
{{- fail (printf "%s: role %s: a worker on several nodes transfers no KV pages, so it does both phases" $where $role) -}}
{{- end -}}
{{- $stages := (include "penstock.meshSizes" .group | fromJson).pipeline | int -}}
{{- if lt $stages (len $names) -}}
{{- $where = printf "%s: group: %s" $where (.group.group | default "" | quote) -}}
{{- fail (printf "%s: each node has a stage at least, so pp%d would work" $where (len $names)) -}}
{{- end -}}
{{- $first := get $nodes (first $names) -}}
{{- $known := .known -}}
{{- range $name := rest $names -}}
{{- $other := get $nodes $name -}}
{{- if ne $first.text $other.text -}}
{{- $keys := include "penstock.differing" (dict "one" $first.settings "other" $other.settings "known" $known) -}}
{{- $where = printf "nodes %s and %s have a group together and differ in %s" (first $names) $name $keys -}}
{{- fail (printf "%s; pods of one worker have the same settings: write them into settings" $where) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/*
The tensor and pipeline sizes of workers' ranks, as JSON.  Takes an entry of the fleet file.
*/}}
{{- define "penstock.meshSizes" -}}
{{- $group := .group | default "" -}}
{{- $tensor := regexFind "tp[0-9]+" $group | trimPrefix "tp" | default "1" | int -}}
{{- $pipeline := regexFind "pp[0-9]+" $group | trimPrefix "pp" | default "1" | int -}}
{{- dict "tensor" $tensor "pipeline" $pipeline | toJson -}}
{{- end }}

{{/*
The name of one of several kinds of workers: by role, by group where a role has several kinds, and by number.
Takes fleet (its name), kind, kinds, and taken (names).
*/}}
{{- define "penstock.kindName" -}}
{{- $taken := .taken -}}
{{- $kind := .kind -}}
{{- $alike := 0 -}}
{{- range .kinds -}}
{{- if eq .component $kind.component -}}{{- $alike = add1 $alike -}}{{- end -}}
{{- end -}}
{{- $base := printf "%s-%s" .fleet $kind.component -}}
{{- $mesh := include "penstock.mesh" $kind -}}
{{- if and (gt (int $alike) 1) (ne $mesh "tp1") -}}
{{- $base = printf "%s-%s" $base (replace "," "-" $mesh) -}}
{{- end -}}
{{- $free := $base -}}
{{- range $number := untilStep 2 (add 2 (len .kinds) | int) 1 -}}
{{- if hasKey $taken $free -}}{{- $free = printf "%s-%d" $base $number -}}{{- end -}}
{{- end -}}
{{- $free -}}
{{- end }}

{{/*
How ranks divide a model, as "tp2,pp2"; "tp1": one rank.  Takes tensor and pipeline.
*/}}
{{- define "penstock.mesh" -}}
{{- $sizes := list -}}
{{- if gt (int .tensor) 1 -}}{{- $sizes = append $sizes (printf "tp%d" (int .tensor)) -}}{{- end -}}
{{- if gt (int .pipeline) 1 -}}{{- $sizes = append $sizes (printf "pp%d" (int .pipeline)) -}}{{- end -}}
{{- join "," $sizes | default "tp1" -}}
{{- end }}

{{/*
One workload as JSON, with settings as a pod needs them: keys where it has them, and as many threads as processors.
Takes root, name, component, worker, count, settings, known, tensor, pipeline, drainS, and hosts: how many nodes one worker
is on if its group names them, or 0.
*/}}
{{- define "penstock.workload" -}}
{{- /* The pods of one worker: those that its group names, or one for each stage. */ -}}
{{- $machines := .hosts | default .pipeline | int -}}
{{- $ranks := mul .tensor .pipeline -}}
{{- $podRanks := div (add $ranks $machines -1) $machines -}}
{{- $options := .root.Values.kubernetes -}}
{{- $wanted := get ($options.resources | default dict) .component | default dict -}}
{{- $cpu := $wanted.cpu | default (ternary "4" "2" .worker) -}}
{{- $memory := $wanted.memory | default (ternary "16Gi" "4Gi" .worker) -}}
{{- $settings := dict -}}
{{- $given := .settings -}}
{{- range $key := .known -}}
{{- if hasKey $given $key -}}{{- $_ := set $settings $key (get $given $key) -}}{{- end -}}
{{- end -}}
{{- $secrets := list "host-keys" -}}
{{- if hasKey $settings "api_keys" -}}
{{- $secrets = append $secrets "api-keys" -}}
{{- $_ := set $settings "api_keys" "/keys/api-keys/api-keys" -}}
{{- end -}}
{{- if hasKey $settings "tls_cert" -}}
{{- $secrets = append $secrets "tls" -}}
{{- $_ := set $settings "tls_cert" "/keys/tls/tls.crt" -}}
{{- $_ := set $settings "tls_key" "/keys/tls/tls.key" -}}
{{- end -}}
{{- if hasKey $settings "kv_key" -}}
{{- $secrets = append $secrets "kv-key" -}}
{{- $_ := set $settings "kv_key" "/keys/kv-key/kv-key" -}}
{{- end -}}
{{- if and .worker (not (hasKey $settings "threads")) -}}
{{- /* Whole ones of a quantity as "8", "3.5" or "7500m". */ -}}
{{- $cores := div (regexFind "^[0-9]+" $cpu | atoi) (ternary 1000 1 (hasSuffix "m" $cpu)) -}}
{{- $_ := set $settings "threads" (max 1 (div $cores $podRanks)) -}}
{{- end -}}
{{- $written := list -}}
{{- range $key := list "kv_disk" "response_store" "audit_log" "trace_file" -}}
{{- if hasKey $settings $key -}}
{{- $path := clean (get $settings $key) -}}
{{- if has $key (list "audit_log" "trace_file") -}}{{- $path = dir $path -}}{{- end -}}
{{- if not (hasPrefix "/" $path) -}}
{{- fail (printf "%s = %q: pods have no such folder; give an absolute path" $key (get $settings $key)) -}}
{{- end -}}
{{- if ne $path "/tmp" -}}{{- $written = append $written $path -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- include "penstock.checkModels" (dict "root" .root "settings" $settings) -}}
{{- $graceS := add (ceil .drainS | int) (ternary 15 20 .worker) -}}
{{- $found := dict "name" .name "component" .component "worker" .worker "count" .count "secrets" $secrets -}}
{{- $_ := set $found "config" (include "penstock.settings" $settings) -}}
{{- $_ := set $found "mesh" (include "penstock.mesh" .) -}}
{{- $_ := set $found "machines" $machines -}}
{{- $_ := set $found "written" ($written | uniq | sortAlpha) -}}
{{- $_ := set $found "cpu" $cpu -}}
{{- $_ := set $found "memory" $memory -}}
{{- $_ := set $found "gpus" ($wanted.gpus | default 0 | toString | int) -}}
{{- $_ := set $found "graceS" $graceS -}}
{{- $scale := get ($options.autoscale | default dict) .component -}}
{{- $_ := set $found "scaled" (not (empty $scale)) -}}
{{- $_ := set $found "least" (ternary (dig "min" 1 ($scale | default dict)) .count (not (empty $scale))) -}}
{{- toJson $found -}}
{{- end }}

{{/*
Fails for an adapter or a draft model that pods do not have.  Takes root and settings.
*/}}
{{- define "penstock.checkModels" -}}
{{- $path := (include "penstock.models" .root | fromYaml).path | default "" -}}
{{- $lora := get .settings "lora" | default list -}}
{{- $named := list -}}
{{- range ternary (splitList "," (toString $lora)) $lora (kindIs "string" $lora) -}}
{{- if trim . -}}{{- $named = append $named (regexReplaceAll "^[^=]*=" (trim .) "") -}}{{- end -}}
{{- end -}}
{{- with get .settings "draft_model" -}}{{- $named = append $named . -}}{{- end -}}
{{- range $named -}}
{{- if not (hasPrefix "/" .) -}}{{- fail (printf "%q: pods have no such folder; give an absolute path" .) -}}{{- end -}}
{{- if not (hasPrefix (clean $path | trimSuffix "/" | printf "%s/") (clean . | printf "%s/")) -}}
{{- $have := ternary (printf "models of %s only" $path) "no models" (ne $path "") -}}
{{- $what := "let kubernetes.models_path name a folder that has all models and adapters" -}}
{{- fail (printf "%s: pods have %s; %s" . $have $what) -}}
{{- end -}}
{{- end -}}
{{- end }}
