//! Embeddings: one vector for each prompt.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use engine::{EventKind, FinishReason, Pooling, Request, RequestKind, TenantId};
use tokio::sync::mpsc::channel;

use super::ask::{CHOICES_MAX, Prompt};
use super::prompt;
use super::sink::{EVENTS_MAX, Sink};
use crate::app::App;
use crate::error::ApiError;
use crate::served::Served;

/// Texts as vectors.
#[derive(Clone, Debug, PartialEq)]
pub struct Embedded {
    /// One for each prompt, of length 1.
    pub vectors: Vec<Vec<f32>>,
    pub prompt_tokens: usize,
}

/// The vectors of `prompts`. Dropping the future cancels what still runs.
pub async fn embed(
    app: &App,
    served: Arc<Served>,
    prompts: Vec<Prompt>,
    pooling: Pooling,
    tenant: TenantId,
) -> Result<Embedded, ApiError> {
    if prompts.is_empty() || prompts.len() > CHOICES_MAX {
        return Err(ApiError::invalid("input", format!("there must be 1 to {CHOICES_MAX} inputs")));
    }
    let prompts: Vec<_> = {
        let served = Arc::clone(&served);
        let encode = move |prompt| prompt::encode(&served, prompt, "input");
        prompt::elsewhere(move || prompts.into_iter().map(encode).collect()).await?
    };
    let prompt_tokens = prompts.iter().map(Vec::len).sum();
    let mut vectors = vec![Vec::new(); prompts.len()];
    let (sender, mut events) = channel(EVENTS_MAX);
    let mut tickets = Vec::with_capacity(prompts.len());
    for (index, prompt) in prompts.into_iter().enumerate() {
        let clock = app.metrics().request(prompt.len());
        let sink = Sink::new(index, sender.clone(), Arc::<AtomicBool>::default(), clock);
        let request = Request { tenant, kind: RequestKind::Embed(pooling), ..Request::greedy(prompt, 0) };
        tickets.push(served.service.submit(request, Box::new(sink))?);
    }
    drop(sender);
    while let Some((index, event)) = events.recv().await {
        match event {
            EventKind::Refused(error) => return Err(error.into()),
            EventKind::Embedding(vector) => vectors[index] = normalised(vector),
            EventKind::Finished(finished) => match finished.reason {
                FinishReason::Failed(failure) => return Err(failure.into()),
                FinishReason::Cancelled => return Err(ApiError::internal("the embedding was cancelled")),
                _ => {}
            },
            _ => {}
        }
    }
    if vectors.iter().any(Vec::is_empty) {
        return Err(ApiError::internal("the engine gave no embedding"));
    }
    Ok(Embedded { vectors, prompt_tokens })
}

/// The vector at length 1, so that a dot product is a cosine. Nothing can be done about one of length 0.
fn normalised(mut vector: Vec<f32>) -> Vec<f32> {
    let length = vector.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
    }
    vector
}
