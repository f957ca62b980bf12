"""Programs that run in their own processes, with the standard library only. Nothing else imports them."""
