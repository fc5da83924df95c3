//! `Accounts`: how many sessions and tokens each client has reserved, and whether it may have more.

use std::collections::HashMap;

use super::{BlockLimits, Client, Refusal};

#[derive(Debug)]
pub(super) struct Accounts {
    limits: BlockLimits,
    /// Of all layers of the block.
    tokens_total: usize,
    used: Account,
    clients: HashMap<Client, Account>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Account {
    sessions: usize,
    tokens: usize,
}

impl Accounts {
    pub fn new(limits: BlockLimits, tokens_total: usize) -> Self {
        Self { limits, tokens_total, used: Account::default(), clients: HashMap::new() }
    }

    pub fn sessions(&self) -> usize {
        self.used.sessions
    }

    pub fn clients(&self) -> usize {
        self.clients.len()
    }

    pub fn tokens_free(&self) -> usize {
        self.tokens_total - self.used.tokens
    }

    /// Adds a session of so many tokens to the client's.
    pub fn reserve(&mut self, client: Client, tokens: usize) -> Result<(), Refusal> {
        let BlockLimits { sessions_max, sessions_per_client_max, tokens_per_client_percent, .. } = self.limits;
        let own = self.clients.get(&client).copied().unwrap_or_default();
        for (sessions, max) in [(self.used.sessions, sessions_max), (own.sessions, sessions_per_client_max)] {
            if sessions >= max {
                return Err(Refusal::TooManySessions { max });
            }
        }
        let own_max = self.tokens_total * tokens_per_client_percent / 100;
        // A client without a session may have one of any length that fits.
        let own_free = if own.sessions == 0 { self.tokens_total } else { own_max.saturating_sub(own.tokens) };
        let free = self.tokens_free().min(own_free);
        if tokens > free {
            return Err(Refusal::NoTokens { needed: tokens, free });
        }
        self.used.add(tokens);
        self.clients.entry(client).or_default().add(tokens);
        Ok(())
    }

    /// Takes a session back that was reserved.
    pub fn release(&mut self, client: Client, tokens: usize) {
        self.used.remove(tokens);
        if let Some(own) = self.clients.get_mut(&client) {
            own.remove(tokens);
            if own.sessions == 0 {
                self.clients.remove(&client);
            }
        }
    }
}

impl Account {
    fn add(&mut self, tokens: usize) {
        self.sessions += 1;
        self.tokens += tokens;
    }

    fn remove(&mut self, tokens: usize) {
        self.sessions -= 1;
        self.tokens -= tokens;
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    fn client(last: u8) -> Client {
        Client::Address(IpAddr::from([127, 0, 0, last]))
    }

    #[test]
    fn a_client_gets_its_part_and_gives_it_back() {
        let limits = BlockLimits { sessions_max: 4, sessions_per_client_max: 2, ..BlockLimits::default() };
        let mut accounts = Accounts::new(limits, 1000);
        accounts.reserve(client(1), 400).unwrap();
        assert_eq!(accounts.reserve(client(1), 101), Err(Refusal::NoTokens { needed: 101, free: 100 }));
        accounts.reserve(client(1), 100).unwrap();
        assert_eq!(accounts.reserve(client(1), 1), Err(Refusal::TooManySessions { max: 2 }));
        assert_eq!(accounts.reserve(client(2), 501), Err(Refusal::NoTokens { needed: 501, free: 500 }));
        accounts.reserve(client(2), 500).unwrap();
        accounts.release(client(1), 400);
        accounts.reserve(client(3), 400).unwrap();
        assert_eq!((accounts.sessions(), accounts.clients(), accounts.tokens_free()), (3, 3, 0));
        accounts.release(client(1), 100);
        accounts.release(client(2), 500);
        accounts.release(client(3), 400);
        assert_eq!((accounts.sessions(), accounts.clients(), accounts.tokens_free()), (0, 0, 1000));
    }

    #[test]
    fn a_client_without_a_session_may_have_a_long_one() {
        let mut accounts = Accounts::new(BlockLimits::default(), 1000);
        accounts.reserve(client(1), 1000).unwrap();
        assert_eq!(accounts.reserve(client(2), 1), Err(Refusal::NoTokens { needed: 1, free: 0 }));
    }
}
