"""Known bugs, one file each or one per part of the model; `catalogue.CATALOGUE` lists them all."""
