"""RESPONSES: OpenAI's Responses, with the errors of OpenAI's dialect."""

from deployments.http.dialect import Dialect
from deployments.http.openai.error_form import ERRORS
from deployments.http.responses.body import parse_responses
from deployments.http.responses.endpoints import ID_PREFIX, PATH, Responses

RESPONSES = Dialect(
    name="responses",
    prefixes=(PATH,),
    errors=ERRORS,
    bodies={"responses": parse_responses},
    endpoints=(Responses,),
    apis={PATH: "responses"},
    answer_ids=(ID_PREFIX,),
)
