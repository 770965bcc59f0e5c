"""Programs that are right, and look as if they might not be: no law may complain of them."""
CORRECT = ()
