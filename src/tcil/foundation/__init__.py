"""What serves all layers: errors, options, arrays, files, random states, ranks, code that users name."""
