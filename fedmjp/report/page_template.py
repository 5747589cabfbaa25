"""The report's Jinja2 template.

A Python string and not a file of its own, because Flower's app bundles carry Python, TOML, Markdown, JSON and YAML files only.
"""

PAGE = r"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Leakage report {{ run.run_id or "" }}</title>
<style>
:root { --ink: #1c1f23; --soft: #5b636d; --line: #d9dde2; --ground: #ffffff; --tint: #f4f6f8; --link: #0b5cad;
  --leak: #b3261e; --unclear: #8a5a00; --none: #1b6e3c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #a3abb5; --line: #3a4149; --ground: #16191d;
  --tint: #1f242a; --link: #7db7f2; --leak: #ff8a80; --unclear: #f2c063; --none: #7fd6a0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 2.5rem 1.5rem 4rem; background: var(--ground); color: var(--ink);
  font: 16px/1.55 Georgia, "Times New Roman", "DejaVu Serif", serif; }
h1, h2, h3, table, nav, .chip, figcaption, summary { font-family: system-ui, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .4rem; }
h2 { font-size: 1.2rem; margin: 2.8rem 0 .7rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
p, li { max-width: 46rem; }
.meta { color: var(--soft); font-size: .9rem; margin: 0 0 1.4rem; }
.warning { border-left: 3px solid var(--unclear); padding: .2rem 0 .2rem .9rem; }
nav { font-size: .88rem; margin: 1.2rem 0; }
nav a { color: var(--link); margin-right: 1.1rem; text-decoration: none; white-space: nowrap; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .84rem; line-height: 1.35; width: 100%; margin: .8rem 0;
  border-top: 1.5px solid var(--ink); border-bottom: 1.5px solid var(--ink); font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; vertical-align: bottom; }
thead th { border-bottom: 1px solid var(--ink); }
th, td { padding: .38rem .7rem .38rem 0; }
td { vertical-align: top; }
tbody tr + tr td { border-top: 1px solid var(--line); }
tr.group th { padding-top: .9rem; border-bottom: 1px solid var(--line); }
tr.baseline td { color: var(--soft); font-style: italic; }
.number { text-align: right; white-space: pre-line; }
td .interval { color: var(--soft); font-size: .72rem; white-space: nowrap; }
table.dense { font-size: .8rem; } table.dense th, table.dense td { padding-right: .45rem; }
table.dense .interval { font-size: .66rem; letter-spacing: -.01em; }
code, pre { font-family: ui-monospace, "SFMono-Regular", Menlo, "DejaVu Sans Mono", monospace; font-size: .84em; }
pre { background: var(--tint); padding: .8rem 1rem; white-space: pre-wrap; overflow-wrap: anywhere; }
td { overflow-wrap: break-word; }
.chip { font-weight: 700; white-space: nowrap; }
.leak { color: var(--leak); } .unclear { color: var(--unclear); } .none { color: var(--none); }
figure { margin: 1.2rem 0 1.6rem; }
figure img { display: block; max-width: 100%; height: auto; margin: 0 auto; background: #fff; padding: .5rem;
  border: 1px solid var(--line); }
figcaption { font-size: .84rem; color: var(--soft); margin-top: .5rem; max-width: 50rem; }
dl { display: grid; grid-template-columns: minmax(9rem, max-content) 1fr; gap: .25rem 1.2rem; font-size: .92rem; }
dt { font-weight: 600; } dd { margin: 0; overflow-wrap: anywhere; }
details { margin: .8rem 0; } summary { cursor: pointer; font-size: .9rem; color: var(--link); }
@media print { body { max-width: none; padding: 0; font-size: 10.5pt; } nav { display: none; }
  h2, h3 { break-after: avoid; } figure, tr { break-inside: avoid; } .scroll { overflow: visible; }
  figure img { max-height: 23cm; } table { font-size: 8pt; } }
</style>
</head>
<body>
{% macro number(text) %}
{% set parts = text.split("\n") %}
<td class="number">{{ parts[0] }}{% if parts | length > 1 %}<br><span class="interval">{{ parts[1] }}</span>{% endif %}</td>
{% endmacro %}
{% macro picture(name) %}
{% if name in figures %}
<figure id="figure-{{ name }}">
<img src="{{ figures[name].source }}" width="{{ figures[name].width }}" alt="{{ captions.get(name, name) }}">
<figcaption>{{ captions.get(name, name) }}</figcaption>
</figure>
{% endif %}
{% endmacro %}
<h1>What the gradients gave away</h1>
<p class="meta">FedMJP leakage report · run {{ run.run_id or "without a name" }} · commit {{ run.commit or "not recorded" }}</p>
<p>{{ opening }}</p>
{% if not run.finished %}
<p class="warning"><strong>This run is not finished.</strong> The numbers cover what was done so far.</p>
{% endif %}
<nav><a href="#verdict">Verdict</a><a href="#threat">Threat model</a><a href="#leakage">Leakage</a><a href="#pictures">Pictures</a>
<a href="#rounds">Rounds</a><a href="#diagnoses">Diagnoses</a><a href="#provenance">Provenance</a></nav>

<h2 id="verdict">Verdict</h2>
<p>For each defence, the attack with the highest mean PSNR. PSNR measures how close a reconstruction comes to the
original: higher means more leakage. A leak is claimed only where the attack beats two answers that need no gradient
at all: a mean image and another image from the data.</p>
{% if verdicts %}
<div class="scroll"><table>
<thead><tr><th>Defence</th><th>Strongest attack</th><th class="number">PSNR in dB<br>[95&nbsp;%&nbsp;interval]</th><th>In words</th></tr></thead>
<tbody>
{% for v in verdicts %}
<tr><td><strong>{{ v.defense }}</strong>{% if v.setting %}<br>{{ v.setting }}{% endif %}</td><td>{{ v.attack or "none" }}</td>
{{ number(v.psnr) }}
<td><span class="chip {{ v.level }}">{{ {"leak": "Leaks.", "unclear": "Undecided.", "none": "No leak shown."}[v.level] }}</span> {{ v.words }}</td></tr>
{% endfor %}
</tbody></table></div>
{% else %}
<p>There are no results to judge.</p>
{% endif %}
<p>“No leak shown” speaks of these attacks with these settings only: it does not prove that a defence is safe.</p>
{% if notes %}
<h3>Notes</h3>
<ul>{% for note in notes %}<li>{{ note }}</li>{% endfor %}</ul>
{% endif %}

<h2 id="threat">What the attacker is granted</h2>
<p>The server follows the protocol and studies what it receives. Beyond that, each attack is granted what is listed
here; an attack that is granted more is a worse case, and its success says less about a server that knows less.</p>
<div class="scroll"><table>
<thead><tr><th>Attack</th><th>Is granted</th><th>Parameters</th></tr></thead>
<tbody>
{% for attack in threat_model %}
<tr><td>{{ attack.attack }}</td><td>{{ attack.grants | join(", ") or "nothing" }}</td><td>{{ attack.parameters or "none" }}</td></tr>
{% endfor %}
</tbody></table></div>

<h2 id="leakage">Leakage</h2>
<p>Mean over images, with the 95 % bootstrap interval of that mean in brackets. The arrow in a heading points to the
more private side. “12 of 16” under Images means that the attack returned an image for 12 of 16; means rest on those
12. Rows in italics are the gradient-free baselines.</p>
<div class="scroll"><table class="dense">
<thead><tr><th>Attack</th><th class="number">Images</th>
{% for heading, meaning in metrics %}
<th class="number">{{ heading }}</th>
{% endfor %}
<th class="number">Median PSNR</th><th class="number">Seconds</th></tr></thead>
<tbody>
{% for line in table %}
{% if line.first %}
<tr class="group"><th colspan="{{ metrics | length + 4 }}">{{ line.group }}</th></tr>
{% endif %}
<tr{% if line.baseline %} class="baseline"{% endif %}><td>{{ line.attack }}</td><td class="number">{{ line.images }}</td>
{% for cell in line.cells %}
{{ number(cell) }}
{% endfor %}
<td class="number">{{ line.psnr_median }}</td><td class="number">{{ line.seconds }}</td></tr>
{% endfor %}
</tbody></table></div>
<h3>How to read the columns</h3>
<dl>
{% for heading, meaning in metrics %}
<dt>{{ heading }}</dt><dd>{{ meaning }}</dd>
{% endfor %}
<dt>Median PSNR</dt><dd>In dB. Far from the mean when a few images are recovered and the others are not.</dd>
<dt>Seconds</dt><dd>Mean time of the attack per row, on the device named below.</dd>
</dl>

<h2 id="pictures">Pictures</h2>
{% if "reconstructions" in figures %}
{{ picture("reconstructions") }}
{% else %}
<p>No pictures were kept for this report.</p>
{% endif %}

<h2 id="rounds">Round by round</h2>
{{ picture("leakage_by_round") }}
{{ picture("training") }}
{% if training %}
<div class="scroll"><table>
<thead><tr><th>Defence</th><th class="number">Last round</th><th class="number">Test accuracy</th><th class="number">Test loss</th><th class="number">Seconds</th></tr></thead>
<tbody>
{% for line in training %}
<tr><td>{{ line.defense }}</td><td class="number">{{ line.round }}</td><td class="number">{{ "%.1f %%" | format(100 * line.accuracy) }}</td>
<td class="number">{{ "%.3f" | format(line.loss) }}</td><td class="number">{{ "%.1f" | format(line.seconds) }}</td></tr>
{% endfor %}
</tbody></table></div>
{% endif %}
{% for name in figures if name not in captions %}
{{ picture(name) }}
{% endfor %}

<h2 id="diagnoses">Where an attack is unsure of its answer</h2>
{% if diagnoses %}
<p>Attacks check their own preconditions. What they found, and for how many rows; a poor score in such a row is no
credit to the defence.</p>
<div class="scroll"><table>
<thead><tr><th>Defence</th><th>Attack</th><th class="number">Rows</th><th>Diagnosis</th></tr></thead>
<tbody>
{% for line in diagnoses %}
<tr><td>{{ line.defense }}</td><td>{{ line.attack }}</td><td class="number">{{ line.count }}</td><td>{{ line.diagnosis }}</td></tr>
{% endfor %}
</tbody></table></div>
{% else %}
<p>Every attack was sure of its answer on every image.</p>
{% endif %}

<h2 id="provenance">Provenance and how to reproduce</h2>
<pre>{{ run.command or "command not recorded" }}</pre>
<p>The seed fixes data order, defence and attacks; on another device or with other versions scores may differ slightly.</p>
<dl>
{% for name, value in provenance %}
<dt>{{ name }}</dt><dd>{{ value }}</dd>
{% endfor %}
{% if skipped %}
<dt>Skipped data</dt><dd>{{ skipped | join("; ") }}</dd>
{% endif %}
</dl>
<details><summary>Configuration</summary>
<dl>
{% for name, value in config %}
<dt><code>{{ name }}</code></dt><dd>{{ value }}</dd>
{% endfor %}
</dl>
</details>
<details><summary>Single images{% if images_total > images | length %}, the {{ images | length }} highest in PSNR of {{ images_total }} rows{% endif %}</summary>
<div class="scroll"><table>
<thead><tr><th>Image</th><th>Defence</th><th>Attack</th><th class="number">Round</th><th class="number">Client</th><th class="number">PSNR (dB)</th><th class="number">SSIM</th></tr></thead>
<tbody>
{% for row in images %}
<tr><td>{{ row.image_id }}</td><td>{{ row.defense }}</td><td>{{ row.attack }}</td><td class="number">{{ row.round }}</td><td class="number">{{ row.client }}</td>
<td class="number">{{ "%.2f" | format(row.psnr) if row.psnr is not none else "–" }}</td><td class="number">{{ "%.3f" | format(row.ssim) if row.ssim is not none else "–" }}</td></tr>
{% endfor %}
</tbody></table></div>
</details>
</body>
</html>
"""
