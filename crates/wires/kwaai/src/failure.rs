//! `KwaaiFailure`: why a peer did not compute. Texts become variants here, and nowhere else.

/// What is kept of a text.
pub const FAILURE_TEXT_BYTES_MAX: usize = 1024;

const WARMING_UP: &str = "node warming up";
const AT_CAPACITY: &str = "node at capacity";
const TIMED_OUT: &str = "handler timed out";
const PANICKED: &str = "forward pass panicked";
const START_BLOCK: &str = "start_block";

/// Displays as the text that is sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KwaaiFailure {
    /// The weights are still being loaded. With what follows in the text.
    #[error("{WARMING_UP}{0}")]
    WarmingUp(String),
    /// As many calls are running as the peer allows on a connection.
    #[error("{AT_CAPACITY}")]
    AtCapacity,
    /// The peer does not have the block that the call needs: token ids need a peer that starts with block 0.
    #[error("{0}")]
    NoSuchBlock(String),
    /// The peer ran longer than a call may; it may have run to the end.
    #[error("{TIMED_OUT}")]
    TimedOut,
    /// The peer is of no use until it restarts. With what follows in the text.
    #[error("{PANICKED}{0}")]
    Panicked(String),
    /// Any other failure of the call itself.
    #[error("{0}")]
    Transport(String),
    /// Any other failure of the model or of the session.
    #[error("{0}")]
    Refused(String),
}

impl KwaaiFailure {
    /// What a peer whose blocks begin with `start` says to token ids.
    pub fn not_first(start: u32) -> Self {
        Self::NoSuchBlock(format!("token ids need {START_BLOCK} 0, this shard has {START_BLOCK} {start}"))
    }

    /// The failure in the error of an envelope.
    pub fn of_error(text: &str) -> Self {
        Self::of(text, Self::Transport)
    }

    /// The failure in a response.
    pub fn of_response(text: &str) -> Self {
        Self::of(text, Self::Refused)
    }

    fn of(text: &str, other: impl FnOnce(String) -> Self) -> Self {
        let text = &text[..text.floor_char_boundary(FAILURE_TEXT_BYTES_MAX)];
        if let Some(rest) = text.strip_prefix(WARMING_UP) {
            Self::WarmingUp(rest.to_owned())
        } else if let Some(rest) = text.strip_prefix(PANICKED) {
            Self::Panicked(rest.to_owned())
        } else if text == AT_CAPACITY {
            Self::AtCapacity
        } else if text == TIMED_OUT {
            Self::TimedOut
        } else if text.contains(START_BLOCK) {
            Self::NoSuchBlock(text.to_owned())
        } else {
            other(text.to_owned())
        }
    }

    /// Whether the same call may be sent to the same peer again, after a while. Only if it has certainly not run: the peer
    /// would append its keys and values a second time. After any other failure the session has to be replayed, under
    /// another id.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::WarmingUp(_) | Self::AtCapacity => true,
            Self::NoSuchBlock(_) | Self::TimedOut | Self::Panicked(_) | Self::Transport(_) | Self::Refused(_) => false,
        }
    }

    /// Whether it is sent as the error of the envelope, not as a response.
    pub fn is_of_call(&self) -> bool {
        match self {
            Self::AtCapacity | Self::TimedOut | Self::Transport(_) => true,
            Self::WarmingUp(_) | Self::NoSuchBlock(_) | Self::Panicked(_) | Self::Refused(_) => false,
        }
    }
}
