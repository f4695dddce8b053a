"""What a run is: the schema, how it is read, and what follows from it. No torch here."""
