"""What the studio starts: jobs, chats and previews of data, each in a process of its own."""
