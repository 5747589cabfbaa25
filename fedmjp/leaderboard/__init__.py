"""The leaderboard: one protocol for every defence, a JSON file for each submission, and the page made of them.

`fedmjp-leaderboard add DEFENSE` drives standard federations through `fedmjp.audited_federation` (`protocol`), measures
their rows (`measure`, `reidentification`, `cost`) and writes a submission (`submission`), which `schema` describes and
`verify` re-runs in part. `page` renders all submissions. Nothing imports this package but its command and the benchmark
that checks the committed page.
"""
