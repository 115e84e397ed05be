"""What ``dibs demo`` plays: a small shop (shop.py), the story told with it (story.py), and its books (account.py)."""
