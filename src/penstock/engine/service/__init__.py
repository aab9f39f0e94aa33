"""A worker's mailbox: messages in, scheduler events out; plans and outcomes in, messages out."""
