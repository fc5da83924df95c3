//! Work that takes long: parsing bodies, templates, tokenizers. It runs on tokio's threads for blocking work, whose number
//! bounds how much runs at once, so that the threads of connections stay free.

use std::time::Duration;

use tokio::time::timeout;

use crate::error::ApiError;

/// A server whose threads take no work for so long does not serve requests, whatever else it answers.
pub const IDLE_MAX: Duration = Duration::from_secs(3);

/// Runs `work` on a thread for blocking work. If the caller is dropped, `work` still ends, with all that it owns.
pub async fn run<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work).await.map_err(|_| ApiError::internal("the request could not be prepared"))?
}

/// Whether a thread takes work within [`IDLE_MAX`].
pub async fn takes_work() -> bool {
    let mut probe = tokio::task::spawn_blocking(|| ());
    let taken = timeout(IDLE_MAX, &mut probe).await.is_ok();
    // What still waits is taken out of the queue.
    probe.abort();
    taken
}
