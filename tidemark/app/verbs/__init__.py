"""What operators type: each verb's command, and what it does. docs/operations/ has a page for each."""
