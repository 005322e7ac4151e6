"""What users hand over: data sets, networks, and what their last layer reads."""
