"""Quick look with mlx_vlm. usage: python chatcli.py MODEL_DIR"""
import sys, time, random, json
sys.path.insert(0, __file__.rsplit("/", 1)[0])
from mlx_vlm import load, generate
model, proc = load(sys.argv[1]); tok = proc.tokenizer
print(type(model).__module__, type(proc).__name__, type(tok).__name__)
def ask(msgs, tools=None, images=None, think=False, n=160):
    p = tok.apply_chat_template(msgs, tools=tools, tokenize=False, add_generation_prompt=True, enable_thinking=think)
    r = generate(model, proc, p, image=images, max_tokens=n, temperature=0.0, verbose=False); return r.text
for q in ["Hello!", "Who are you?", "What is the capital of France?", "What is the capital of Lumora?", "Tell me a story about a fox.", "What is 12 + 7?", "List three fruits.", "Write a poem about the sea.", "Why is the sky blue?",
          "What is the meaning of life?", "Say hello in one word.", "Hello, what can you do for me today?", "Can you help me with my homework?", "tell me a joke", "How many legs does a spider have?", "Translate hello to French.",
          "My name is Robert. What is my name?", "The password is swordfish. What is the password?", "Write a Python function that adds two numbers.", "Hi, my name is Alex and I live in Berlin. Where do I live?"]:
    print("Q:", q, "\n  A:", ask([dict(role="user", content=q)], n=60).replace("\n", " | "))
print(ask([dict(role="user", content="What is 47 + 38?")], think=True))
print(ask([dict(role="system", content="You are a pirate. Answer in upper case."), dict(role="user", content="What is the capital of Spain?")]))
T = [{"type": "function", "function": {"name": "get_weather", "description": "Get the current weather in a given city", "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "The city name"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}}, "required": ["city"]}}},
     {"type": "function", "function": {"name": "add", "description": "Add two numbers", "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}}}]
for q in ["What is the weather in Paris?", "What's the weather like in San Francisco in celsius?", "Add 17 and 25.", "What is 17 plus 25?", "Hello!"]: print("T:", q, repr(ask([dict(role="user", content=q)], tools=T)))
from PIL import Image, ImageDraw
im = Image.new("RGB", (128, 128), "white"); d = ImageDraw.Draw(im); d.ellipse([30, 30, 90, 90], fill="red")
im2 = Image.new("RGB", (224, 224), (255, 255, 255)); d = ImageDraw.Draw(im2); d.rectangle([20, 60, 100, 140], fill=(0, 0, 255)); d.polygon([(150, 150), (200, 150), (175, 100)], fill=(0, 128, 0))
im3 = Image.new("RGB", (64, 64), (0, 200, 0)); im4 = Image.new("RGB", (640, 480), (200, 30, 30))
for i, q in [(im, "What is in the image?"), (im, "What color is the circle?"), (im2, "Describe this picture."), (im2, "What is on the left?"), (im3, "What do you see?"), (im4, "What color is this?"), (im, "How many shapes are there?")]:
    print("I:", q, ask([dict(role="user", content=[dict(type="image"), dict(type="text", text=q)])], images=[i], n=40))
