//! `Accounts`: how many sessions and tokens each client has reserved, and whether it may have more.

use std::collections::HashMap;

use super::{BlockLimits, Client, Refusal};

#[derive(Clone, Debug)]
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

/// Why there is no room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shortage {
    pub refusal: Refusal,
    /// The client has its whole part: only its own sessions could make room.
    pub is_own: bool,
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

    /// Tokens that a client has reserved.
    pub fn tokens_of(&self, client: Client) -> usize {
        self.clients.get(&client).map_or(0, |own| own.tokens)
    }

    /// Adds a session of so many tokens to the client's.
    pub fn reserve(&mut self, client: Client, tokens: usize) -> Result<(), Shortage> {
        let BlockLimits { sessions_max, sessions_per_client_max, .. } = self.limits;
        let own = self.of(client);
        for (sessions, max, is_own) in
            [(own.sessions, sessions_per_client_max, true), (self.used.sessions, sessions_max, false)]
        {
            if sessions >= max {
                return Err(Shortage { refusal: Refusal::TooManySessions { max }, is_own });
            }
        }
        self.check_tokens(own, own.sessions, tokens)?;
        self.used.sessions += 1;
        self.clients.entry(client).or_default().sessions += 1;
        self.add_tokens(client, tokens);
        Ok(())
    }

    /// Adds tokens to a session of the client's.
    pub fn grow(&mut self, client: Client, tokens: usize) -> Result<(), Shortage> {
        let own = self.of(client);
        self.check_tokens(own, own.sessions.saturating_sub(1), tokens)?;
        self.add_tokens(client, tokens);
        Ok(())
    }

    fn of(&self, client: Client) -> Account {
        self.clients.get(&client).copied().unwrap_or_default()
    }

    /// `others`: the client's sessions beside the one that needs the tokens.
    fn check_tokens(&self, own: Account, others: usize, tokens: usize) -> Result<(), Shortage> {
        let own_max = self.tokens_total * self.limits.tokens_per_client_percent / 100;
        // A client's only session may have any length that fits.
        let own_free = if others == 0 { self.tokens_total } else { own_max.saturating_sub(own.tokens) };
        let free = self.tokens_free().min(own_free);
        let refusal = Refusal::NoTokens { needed: tokens, free };
        if tokens > free { Err(Shortage { refusal, is_own: tokens > own_free }) } else { Ok(()) }
    }

    fn add_tokens(&mut self, client: Client, tokens: usize) {
        self.used.tokens += tokens;
        self.clients.entry(client).or_default().tokens += tokens;
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
        let no_tokens = |needed, free, is_own| Err(Shortage { refusal: Refusal::NoTokens { needed, free }, is_own });
        accounts.reserve(client(1), 400).unwrap();
        assert_eq!(accounts.reserve(client(1), 101), no_tokens(101, 100, true));
        accounts.reserve(client(1), 100).unwrap();
        let refusal = Refusal::TooManySessions { max: 2 };
        assert_eq!(accounts.reserve(client(1), 1), Err(Shortage { refusal, is_own: true }));
        assert_eq!(accounts.reserve(client(2), 501), no_tokens(501, 500, false));
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
        let refusal = Refusal::NoTokens { needed: 1, free: 0 };
        assert_eq!(accounts.reserve(client(2), 1), Err(Shortage { refusal, is_own: false }));
    }

    #[test]
    fn a_session_grows_within_the_part_of_its_client() {
        let mut accounts = Accounts::new(BlockLimits::default(), 1000);
        accounts.reserve(client(1), 0).unwrap();
        accounts.grow(client(1), 600).unwrap();
        accounts.reserve(client(1), 0).unwrap();
        let refusal = Refusal::NoTokens { needed: 1, free: 0 };
        assert_eq!(accounts.grow(client(1), 1), Err(Shortage { refusal, is_own: true }));
        accounts.release(client(1), 600);
        accounts.grow(client(1), 1000).unwrap();
        assert_eq!((accounts.tokens_of(client(1)), accounts.tokens_free()), (1000, 0));
        accounts.release(client(1), 1000);
        assert_eq!((accounts.tokens_of(client(1)), accounts.tokens_free()), (0, 1000));
    }
}
