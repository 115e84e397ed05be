"""What dibs ships for testing: the contract suite for stores."""
