//! Work that takes long: parsing bodies, templates, tokenizers, grammars. It runs on tokio's threads for blocking work, whose
//! number bounds how much runs at once, so that the threads of connections stay free.

use crate::error::ApiError;

/// Runs `work` on a thread for blocking work. If the caller is dropped, `work` still ends, with all that it owns.
pub async fn run<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work).await.map_err(|_| ApiError::internal("the request could not be prepared"))?
}
