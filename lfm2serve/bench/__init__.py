"""The receipts: commands that measure what the README claims, on the reader's own machine."""
