"""Readers of what `worklog profile` leaves: each turns one artifact into plain dicts and lists that a page can cite.

Times are integer nanoseconds, sizes integer bytes, fractions are of one. What a trace cannot tell is None with a
`note`, never zero.
"""
