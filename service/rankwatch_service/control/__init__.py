"""What is done about a job: commands, orders, policy, the checkpoint ledger, the audit trail."""
