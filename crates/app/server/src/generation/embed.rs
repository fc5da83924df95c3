//! Embeddings: one vector for each prompt.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use engine::{EventKind, FinishReason, Pooling, Request, RequestKind, TenantId};
use tokio::sync::mpsc::channel;
use types::TokenId;

use super::prompt;
use super::request::{CHOICES_MAX, Prompt};
use super::sink::{ChannelSink, EVENTS_MAX};
use crate::blocking;
use crate::body_budget::BodyPermit;
use crate::error::ApiError;
use crate::models::ModelUse;

/// The embeddings of a request's prompts.
#[derive(Clone, Debug, PartialEq)]
pub struct EmbeddingOutput {
    /// One vector for each prompt, of length 1.
    pub vectors: Vec<Vec<f32>>,
    pub prompt_tokens: usize,
}

/// The vectors of `prompts`. Dropping the future cancels the requests that still run.
pub async fn embed(
    model: ModelUse,
    prompts: Vec<Prompt>,
    pooling: Pooling,
    permit: BodyPermit,
) -> Result<EmbeddingOutput, ApiError> {
    if prompts.is_empty() || prompts.len() > CHOICES_MAX {
        return Err(ApiError::invalid("input", format!("there must be 1 to {CHOICES_MAX} inputs")));
    }
    let tenant = permit.tenant();
    let prompts: Vec<_> = {
        let model = model.clone();
        let encode = move |prompt| prompt::encode(&model, prompt, "input");
        blocking::run(move || {
            let _permit = permit;
            prompts.into_iter().map(encode).collect()
        })
        .await?
    };
    embed_tokens(&model, prompts, pooling, tenant).await
}

/// The same, for prompts of tokens.
pub async fn embed_tokens(
    model: &ModelUse,
    prompts: Vec<Vec<TokenId>>,
    pooling: Pooling,
    tenant: TenantId,
) -> Result<EmbeddingOutput, ApiError> {
    let prompt_tokens = prompts.iter().map(Vec::len).sum();
    let mut vectors = vec![Vec::new(); prompts.len()];
    let (sender, mut events) = channel(EVENTS_MAX);
    let mut tickets = Vec::with_capacity(prompts.len());
    for (index, prompt) in prompts.into_iter().enumerate() {
        let timer = model.slot().metrics().request(prompt.len());
        let sink = ChannelSink::new(index, sender.clone(), Arc::<AtomicBool>::default(), timer);
        let request = Request { tenant, kind: RequestKind::Embed(pooling), ..Request::greedy(prompt, 0) };
        tickets.push(model.service.submit(request, Box::new(sink))?);
    }
    drop(sender);
    while let Some((index, event)) = events.recv().await {
        match event {
            EventKind::Refused(error) => return Err(error.into()),
            EventKind::Embedding(vector) => vectors[index] = normalized(vector),
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
    Ok(EmbeddingOutput { vectors, prompt_tokens })
}

/// Scales the vector to length 1, so that a dot product is a cosine. The zero vector stays as it is.
pub fn normalized(mut vector: Vec<f32>) -> Vec<f32> {
    let length = vector.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
    }
    vector
}
