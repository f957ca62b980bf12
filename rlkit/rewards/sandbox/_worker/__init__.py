"""Programs that run in processes of their own, with the standard library only. Nothing else imports them."""
