"""How long a step of an optimizer takes on this machine, beside other libraries' in the same run, and must take."""
