//! `JsonBody<T>`: the extractor of JSON bodies. It limits size and time, and errors name the wrong field.

use std::time::Duration;

use axum::body::to_bytes;
use axum::extract::{FromRequest, Request};
use axum::http::header::CONTENT_TYPE;
use serde::de::DeserializeOwned;
use tokio::time::timeout;
use utoipa::ToSchema;

use crate::app::SharedApp;
use crate::contract;
use crate::error::{ApiError, ApiErrorKind};

/// Time for a client to send its body.
const BODY_TIME_MAX: Duration = Duration::from_secs(60);

/// A body that both `T` and its schema in `/openapi.json` accept. Unknown fields are ignored.
pub struct JsonBody<T>(pub T);

impl<T: DeserializeOwned + ToSchema> FromRequest<SharedApp> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &SharedApp) -> Result<Self, ApiError> {
        let media = request.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let media = media.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        if media != "application/json" {
            return Err(ApiError::new(ApiErrorKind::MediaType, "the body must be application/json"));
        }
        let max = app.config().body_bytes_max;
        let too_large = || ApiError::new(ApiErrorKind::TooLarge, format!("the body is longer than {max} bytes"));
        let declared = request.headers().get(axum::http::header::CONTENT_LENGTH);
        if declared.and_then(|value| value.to_str().ok()?.parse::<u64>().ok()).is_some_and(|bytes| bytes > max as u64) {
            return Err(too_large());
        }
        let late = |_| ApiError::new(ApiErrorKind::Invalid, "the body took too long to arrive").code("body_timeout");
        let bytes = timeout(BODY_TIME_MAX, to_bytes(request.into_body(), max)).await.map_err(late)?;
        // The error is either the size limit or a broken connection; over the latter no response can be sent.
        let bytes = bytes.map_err(|_| too_large())?;
        // The type is parsed before the schema is checked, because its error messages are clearer.
        let body = parse(&bytes)?;
        contract::check(&T::name(), &parse(&bytes)?)?;
        Ok(Self(body))
    }
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        let error = ApiError::new(ApiErrorKind::Invalid, format!("the body cannot be read: {inner}"));
        match inner.classify() {
            serde_json::error::Category::Data if path != "." => error.code("invalid_type").param(path),
            serde_json::error::Category::Data => error.code("invalid_type"),
            _ => error.code("invalid_json"),
        }
    })?;
    let rest = reader.end().map_err(|error| ApiError::new(ApiErrorKind::Invalid, format!("after the body: {error}")));
    rest.map_err(|error| error.code("invalid_json"))?;
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize)]
    struct Example {
        list: Vec<u32>,
    }

    fn check(json: &str, code: &str, param: Option<&str>) {
        let error = parse::<Example>(json.as_bytes()).unwrap_err();
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
    fn unknown_fields_are_left_alone() {
        assert_eq!(parse::<Example>(br#"{"list": [7], "other": {}}"#).unwrap().list, [7]);
    }
}
