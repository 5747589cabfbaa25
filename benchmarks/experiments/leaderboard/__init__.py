"""The leaderboard's page and its small table, which `fedmjp-leaderboard` fills."""
