"""What operators type: each verb's command, and what it does. docs/how-to/runbooks/ has a page for each."""
