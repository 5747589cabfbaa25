"""`python -m fedmjp.leaderboard`."""

from fedmjp.leaderboard.cli import main

raise SystemExit(main())
