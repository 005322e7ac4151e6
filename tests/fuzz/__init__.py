"""Random and hostile input for every public entry, and what must hold for whatever comes out."""
