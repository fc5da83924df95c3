//! `JsonBody<T>`: the extractor of JSON bodies. It limits size and time, and errors name the wrong field.

use std::time::Duration;

use axum::body::BodyDataStream;
use axum::extract::{FromRequest, Request};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE, EXPECT, ORIGIN};
use futures_util::StreamExt;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::timeout;
use utoipa::ToSchema;

use crate::app::SharedApp;
use crate::auth::Caller;
use crate::blocking;
use crate::body_budget::BodyPermit;
use crate::contract;
use crate::error::{ApiError, ApiErrorKind};

/// Time for a client to send its body.
const BODY_TIME_MAX: Duration = Duration::from_secs(60);
/// How long the rest of a refused body is read and dropped. Many clients read a response only once they have sent everything, and
/// would find a closed connection instead.
const DISCARD_TIME_MAX: Duration = Duration::from_secs(5);

/// The maximum values in a body. A value takes up to 80 bytes of memory, an object several times that, however short its text is.
const VALUES_MAX: usize = 500_000;

/// A body that both `T` and its schema in `/openapi.json` accept, and its permit, which is to be held until its prompt is
/// prepared. Unknown fields are ignored.
pub struct JsonBody<T>(pub T, pub BodyPermit);

impl<T: DeserializeOwned + ToSchema + Send + 'static> FromRequest<SharedApp> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &SharedApp) -> Result<Self, ApiError> {
        check_media_type(&request)?;
        let max = app.config().body_bytes_max;
        let declared = request.headers().get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
        // Such a client sends nothing before it is told to continue, which reading would do.
        let waits = request.headers().contains_key(EXPECT);
        let tenant = request.extensions().get::<Caller>().map_or_else(Default::default, |caller| caller.0);
        let mut permit = app.bodies().begin(tenant);
        let mut body = request.into_body().into_data_stream();
        let received = match declared {
            Some(bytes) if bytes > max as u64 => Err(too_large(max)),
            _ => read_in_time(&mut body, max, &mut permit).await,
        };
        let bytes = match received {
            Ok(bytes) => bytes,
            Err(error) => {
                drop(permit);
                if !waits {
                    discard(body).await;
                }
                return Err(error);
            }
        };
        permit.complete();
        blocking::run(move || {
            // The schema is checked before the type is made, because its errors are sentences for people.
            let mut body = parse(&bytes)?;
            contract::check(&T::name(), &mut body)?;
            Ok(Self(typed(body)?, permit))
        })
        .await
    }
}

/// Scripts need not say that they send JSON: `curl -d` calls it a form. Pages have to: from another origin they can send a
/// form, but not `application/json`, without asking first.
fn check_media_type(request: &Request) -> Result<(), ApiError> {
    let media = request.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let media = media.split(';').next().unwrap_or_default().trim();
    if media.eq_ignore_ascii_case("application/json") || !request.headers().contains_key(ORIGIN) {
        return Ok(());
    }
    Err(ApiError::new(ApiErrorKind::MediaType, "the body must be application/json"))
}

async fn read_in_time(body: &mut BodyDataStream, max: usize, permit: &mut BodyPermit) -> Result<Vec<u8>, ApiError> {
    let late = |_| ApiError::new(ApiErrorKind::Invalid, "the body took too long to arrive").code("body_timeout");
    timeout(BODY_TIME_MAX, read(body, max, permit)).await.map_err(late)?
}

async fn read(body: &mut BodyDataStream, max: usize, permit: &mut BodyPermit) -> Result<Vec<u8>, ApiError> {
    let mut bytes = Vec::new();
    loop {
        let chunk = tokio::select! {
            chunk = body.next() => chunk,
            error = permit.cut_off() => return Err(error),
        };
        let Some(chunk) = chunk else { return Ok(bytes) };
        // Over a connection that broke, no response can be sent.
        let chunk = chunk.map_err(|_| ApiError::new(ApiErrorKind::Invalid, "the body broke off"))?;
        if bytes.len() + chunk.len() > max {
            return Err(too_large(max));
        }
        permit.grow(chunk.len()).await?;
        bytes.extend_from_slice(&chunk);
    }
}

async fn discard(mut body: BodyDataStream) {
    let reading = async { while let Some(Ok(_)) = body.next().await {} };
    // A client that sends for longer finds its connection closed.
    let _ = timeout(DISCARD_TIME_MAX, reading).await;
}

fn too_large(max: usize) -> ApiError {
    ApiError::new(ApiErrorKind::TooLarge, format!("the body is longer than {max} bytes"))
}

/// Fails if the values of this JSON would take too much memory.
pub fn check_values(json: &[u8]) -> Result<(), ApiError> {
    if values_bound(json) > VALUES_MAX {
        let message = format!("the body has more than {VALUES_MAX} values");
        return Err(ApiError::new(ApiErrorKind::TooLarge, message).code("too_many_values"));
    }
    Ok(())
}

fn parse(bytes: &[u8]) -> Result<Value, ApiError> {
    check_values(bytes)?;
    let invalid = |error| ApiError::new(ApiErrorKind::Invalid, format!("the body is not valid JSON: {error}"));
    serde_json::from_slice(bytes).map_err(|error| invalid(error).code("invalid_json"))
}

/// An upper bound of the values in JSON: all but the first follow one of `[`, `{` and `,`.
fn values_bound(json: &[u8]) -> usize {
    let (mut count, mut in_string, mut is_escaped) = (1, false, false);
    for &byte in json {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = in_string,
            b'"' => in_string = !in_string,
            b'[' | b'{' | b',' if !in_string => count += 1,
            _ => {}
        }
    }
    count
}

/// A body that its schema accepts, as its type. Few errors are left: what a schema cannot express.
fn typed<T: DeserializeOwned>(body: Value) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(body).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        match path.as_str() {
            "." => ApiError::new(ApiErrorKind::Invalid, format!("the body cannot be used: {inner}")),
            _ => ApiError::new(ApiErrorKind::Invalid, format!("`{path}` cannot be used: {inner}")).param(path),
        }
        .code("invalid_type")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize)]
    struct Example {
        list: Vec<u32>,
    }

    fn read(json: &str) -> Result<Example, ApiError> {
        typed(parse(json.as_bytes())?)
    }

    fn check(json: &str, code: &str, param: Option<&str>) {
        let error = read(json).unwrap_err();
        assert_eq!((error.code, error.param.as_deref()), (Some(code), param), "{json}");
    }

    #[test]
    fn the_field_at_fault_is_named() {
        check(r#"{"list": [1, "x"]}"#, "invalid_type", Some("list[1]"));
        check(r#"{"list": 7}"#, "invalid_type", Some("list"));
        check("{}", "invalid_type", None);
        check("7", "invalid_type", None);
    }

    #[test]
    fn what_is_not_json_is_said_to_be_that() {
        check(r#"{"list": ["#, "invalid_json", None);
        check(r#"{"list": []} x"#, "invalid_json", None);
        check("\u{0}", "invalid_json", None);
    }

    #[test]
    fn values_are_counted_before_they_are_made() {
        assert_eq!(values_bound(br#"{"a": [1, 2], "b,[{": "x\",[\\"}"#), 5);
        let list = |count: usize| format!(r#"{{"list": [0{}]}}"#, ",0".repeat(count - 1));
        assert_eq!(read(&list(VALUES_MAX - 2)).unwrap().list.len(), VALUES_MAX - 2);
        check(&list(VALUES_MAX - 1), "too_many_values", None);
        assert!(read(&format!(r#"{{"list": [], "text": "{}"}}"#, ",".repeat(VALUES_MAX))).is_ok());
    }

    #[test]
    fn unknown_fields_are_left_alone() {
        assert_eq!(read(r#"{"list": [7], "other": {}}"#).unwrap().list, [7]);
    }
}
