"""From lake tables to releases: finds the SQL, orders it, builds aside, checks, and swaps the live release."""
