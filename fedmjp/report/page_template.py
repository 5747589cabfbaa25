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
  --leaks: #b3261e; --partly: #9a4f00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #a3abb5; --line: #3a4149; --ground: #16191d;
  --tint: #1f242a; --link: #7db7f2; --leaks: #ff8a80; --partly: #f2b063; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 2.5rem 1.5rem 4rem; background: var(--ground); color: var(--ink);
  font: 16px/1.55 Georgia, "Times New Roman", "DejaVu Serif", serif; }
h1, h2, h3, table, nav, .chip, figcaption, summary { font-family: system-ui, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .4rem; }
h2 { font-size: 1.2rem; margin: 2.8rem 0 .7rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
p, li { max-width: 46rem; }
.meta { color: var(--soft); font-size: .9rem; margin: 0 0 1.4rem; }
.warning { border-left: 3px solid var(--partly); padding: .2rem 0 .2rem .9rem; }
nav { font-size: .88rem; margin: 1.2rem 0; }
nav a { color: var(--link); margin-right: 1.1rem; text-decoration: none; display: inline-block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .84rem; line-height: 1.35; width: 100%; margin: .8rem 0;
  border-top: 1.5px solid var(--ink); border-bottom: 1.5px solid var(--ink); font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; vertical-align: bottom; }
thead th { border-bottom: 1px solid var(--ink); }
th, td { padding: .38rem .7rem .38rem 0; }
td { vertical-align: top; }
tbody tr + tr td, tbody tr + tr th { border-top: 1px solid var(--line); }
tr.group th { padding-top: .9rem; border-bottom: 1px solid var(--line); }
tr.baseline td { color: var(--soft); font-style: italic; }
.number { text-align: right; white-space: pre-line; }
td .interval { color: var(--soft); font-size: .72rem; white-space: nowrap; }
table.dense { font-size: .8rem; } table.dense th, table.dense td { padding-right: .45rem; }
table.dense .interval { font-size: .66rem; letter-spacing: -.01em; }
code, pre { font-family: ui-monospace, "SFMono-Regular", Menlo, "DejaVu Sans Mono", monospace; font-size: .84em; }
pre { background: var(--tint); padding: .8rem 1rem; white-space: pre-wrap; overflow-wrap: anywhere; }
td, p, li, h1, h3 { overflow-wrap: break-word; }
tbody th { font-weight: 400; vertical-align: top; }
tr.baseline th { color: var(--soft); font-style: italic; }
.chip { font-weight: 700; white-space: nowrap; }
.verdict { border-left: 5px solid var(--soft); background: var(--tint); padding: .7rem 1rem; margin: .9rem 0; }
.verdict h3 { margin: 0 0 .2rem; } .verdict p { margin: 0 0 .3rem; } .verdict .chip { color: var(--soft); }
.verdict ul { margin: .2rem 0 0; padding-left: 1.1rem; font-size: .86rem; color: var(--soft); }
.verdict.leaks { border-color: var(--leaks); } .verdict.leaks .chip { color: var(--leaks); }
.verdict.partly { border-color: var(--partly); } .verdict.partly .chip { color: var(--partly); }
figure { margin: 1.2rem 0 1.6rem; }
figure img { display: block; max-width: 100%; height: auto; margin: 0 auto; background: #fff; padding: .5rem;
  border: 1px solid var(--line); }
figcaption { font-size: .84rem; color: var(--soft); margin-top: .5rem; max-width: 50rem; }
@media (max-width: 40rem) { body { padding: 1.2rem 1rem 3rem; } dl { grid-template-columns: 1fr !important; }
  dd { margin-bottom: .4rem !important; } table.wide { min-width: 34rem; } }
dl { display: grid; grid-template-columns: minmax(9rem, 16rem) 1fr; gap: .25rem 1.2rem; font-size: .92rem; }
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
{% macro scroll(label) %}
<div class="scroll" tabindex="0" role="region" aria-label="{{ label }}">{{ caller() }}</div>
{% endmacro %}
{% macro picture(name) %}
{% if name in figures %}
<figure id="figure-{{ name }}">
<img src="{{ figures[name].source }}" width="{{ figures[name].width }}" alt="{{ figures[name].alt }}">
<figcaption>{{ captions.get(name, name) }}</figcaption>
</figure>
{% endif %}
{% endmacro %}
<main>
<h1>What the updates leak</h1>
<p class="meta">FedMJP leakage report · run {{ run.run_id or "without a name" }} · commit {{ run.commit or "not recorded" }}</p>
{% if not run.finished %}
<p class="warning"><strong>This run is not finished.</strong> The numbers cover what was done so far.</p>
{% endif %}

<h2 id="verdict">Verdict</h2>
{% for v in verdicts %}
<section class="verdict {{ v.kind }}">
<h3>{{ v.title }}</h3>
<p><span class="chip">{{ v.answer | capitalize }}:</span> {{ v.reason }}.</p>
{% if v.details %}
<ul>{% for line in v.details %}<li>{{ line }}</li>{% endfor %}</ul>
{% endif %}
</section>
{% else %}
<p>There are no results to judge.</p>
{% endfor %}
<p>An attack counts as far as it comes nearer to the original than the better of two guesses that need no gradient: the
mean image, and another image from the data. “No leak shown” speaks of the attacks that were run, with these settings and
grants; it is no statement about other attacks. “Certified” means that the reconstruction reproduces the update.</p>
{% if notes %}
<h3>Notes</h3>
<ul>{% for note in notes %}<li>{{ note }}</li>{% endfor %}</ul>
{% endif %}
<nav aria-label="Sections"><a href="#run">What was run</a><a href="#leakage">Leakage</a><a href="#pictures">Pictures</a>
<a href="#rounds">Rounds</a><a href="#diagnoses">Diagnoses</a><a href="#provenance">Provenance</a></nav>

<h2 id="run">What was run, and what was not</h2>
<p>{{ opening }}</p>
<p>The server follows the protocol and studies what it receives. Beyond an update, it is granted:
{% for grants in grants %}{{ grants or "nothing" }}{% if not loop.last %}; or {% endif %}{% else %}nothing{% endfor %}. A
server that knows less may see less.</p>
{% if parameters %}
{% call scroll("Attacks and their settings") %}<table>
<thead><tr><th scope="col">Attack</th><th scope="col">Settings</th></tr></thead>
<tbody>
{% for attack in parameters %}
<tr><th scope="row">{{ attack.attack }}</th><td>{{ attack.settings }}</td></tr>
{% endfor %}
</tbody></table>{% endcall %}
{% endif %}
{% if not_run %}
<h3>Registered attacks that were not run</h3>
{% call scroll("Attacks that were not run") %}<table class="wide">
<thead><tr><th scope="col">Attacks</th><th scope="col">Reason</th><th scope="col">Defences</th></tr></thead>
<tbody>
{% for line in not_run %}
<tr><th scope="row">{{ line.attacks }}</th><td>{{ line.reason }}</td><td>{{ line.defense }}</td></tr>
{% endfor %}
</tbody></table>{% endcall %}
{% endif %}

<h2 id="leakage">Leakage</h2>
<p>Mean over images, with the 95 % bootstrap interval of that mean in brackets; one image has no interval. The arrow in a
heading points to less leakage. “12 of 16” under Images means that the attack returned an image for 12 of 16; means are
over those 12. Rows in italics are the two guesses that need no gradient.</p>
{% call scroll("Leakage by defence and attack") %}<table class="dense">
<thead><tr><th scope="col">Attack</th><th scope="col" class="number">Images</th>
{% for heading, meaning in metrics %}
<th scope="col" class="number">{{ heading }}</th>
{% endfor %}
<th scope="col" class="number">Median PSNR</th><th scope="col" class="number">Vouched for</th><th scope="col" class="number">Certified</th><th scope="col" class="number">Seconds</th></tr></thead>
{% for group in table %}
<tbody>
<tr class="group"><th scope="rowgroup" colspan="{{ metrics | length + 6 }}">{{ group.title }}</th></tr>
{% for line in group.lines %}
<tr{% if line.baseline %} class="baseline"{% endif %}><th scope="row">{{ line.attack }}</th><td class="number">{{ line.images }}</td>
{% for cell in line.cells %}
{{ number(cell) }}
{% endfor %}
<td class="number">{{ line.psnr_median }}</td><td class="number">{{ line.vouched }}</td><td class="number">{{ line.certified }}</td><td class="number">{{ line.seconds }}</td></tr>
{% endfor %}
</tbody>
{% endfor %}
</table>{% endcall %}
<h3>How to read the columns</h3>
<dl>
{% for heading, meaning in metrics %}
<dt>{{ heading }}</dt><dd>{{ meaning }}</dd>
{% endfor %}
<dt>Median PSNR</dt><dd>In dB. Far from the mean where a few images are reconstructed well and the others are not.</dd>
<dt>Vouched for</dt><dd>Share of pixels that the attack claims to know, by its own estimate of its error.</dd>
<dt>Certified</dt><dd>Images whose reconstruction reproduces the update to the precision of the message, which needs no
original. Not being certified says nothing against an answer.</dd>
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
{% call scroll("Accuracy after the last round") %}<table>
<thead><tr><th scope="col">Defence</th><th scope="col" class="number">Last round</th><th scope="col" class="number">Test accuracy</th><th scope="col" class="number">Test loss</th><th scope="col" class="number">Seconds</th></tr></thead>
<tbody>
{% for line in training %}
<tr><th scope="row">{{ line.defense }}</th><td class="number">{{ line.round }}</td><td class="number">{{ "%.1f %%" | format(100 * line.accuracy) }}</td>
<td class="number">{{ "%.3f" | format(line.loss) }}</td><td class="number">{{ "%.1f" | format(line.seconds) }}</td></tr>
{% endfor %}
</tbody></table>{% endcall %}
{% endif %}
{% for name in figures if name not in captions %}
{{ picture(name) }}
{% endfor %}

<h2 id="diagnoses">Diagnoses</h2>
{% if diagnoses %}
<p>Attacks check their own assumptions. What they found, and in how many rows; a poor score in such a row says nothing
for the defence.</p>
{% call scroll("Diagnoses") %}<table class="wide">
<thead><tr><th scope="col">Attack</th><th scope="col">Diagnosis</th><th scope="col" class="number">Rows</th><th scope="col">Defences</th></tr></thead>
<tbody>
{% for line in diagnoses %}
<tr><th scope="row">{{ line.attack }}</th><td>{{ line.diagnosis }}</td><td class="number">{{ line.count }}</td><td>{{ line.defense }}</td></tr>
{% endfor %}
</tbody></table>{% endcall %}
{% else %}
<p>The assumptions of every attack that was run held on every image.</p>
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
{% call scroll("Single images") %}<table class="wide">
<thead><tr><th scope="col">Image</th><th scope="col">Defence</th><th scope="col">Attack</th><th scope="col" class="number">Round</th><th scope="col" class="number">Client</th><th scope="col" class="number">PSNR (dB)</th><th scope="col" class="number">SSIM</th></tr></thead>
<tbody>
{% for row in images %}
<tr><th scope="row">{{ row.image_id }}</th><td>{{ row.defense }}</td><td>{{ row.attack }}</td><td class="number">{{ row.round }}</td><td class="number">{{ row.client }}</td>
<td class="number">{{ "%.2f" | format(row.psnr) if row.psnr is not none else "–" }}</td><td class="number">{{ "%.3f" | format(row.ssim) if row.ssim is not none else "–" }}</td></tr>
{% endfor %}
</tbody></table>{% endcall %}
</details>
</main>
</body>
</html>
"""
