"""From stored runs to tables, pictures and a page."""
