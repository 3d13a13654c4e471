"""Pages and figures drawn from records: what a reader sees is an expression over evidence."""
