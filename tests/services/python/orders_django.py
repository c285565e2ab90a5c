import json
import os

import django
from django.conf import settings
from django.db import connection, models, transaction

shop = {"ENGINE": "django.db.backends.postgresql", "NAME": os.environ["PGDATABASE"]}
settings.configure(DATABASES={"default": shop})
django.setup()


class Order(models.Model):
    stream_id = models.BigIntegerField(primary_key=True)
    total = models.IntegerField()

    class Meta:
        app_label = "shop"
        db_table = "orders"


def place(total: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT tidemark.append('orders', %s::jsonb)", [json.dumps({"total": total})])
        (stream_id,) = cursor.fetchone()
    Order.objects.create(stream_id=stream_id, total=total)


with transaction.atomic():
    place(40)

with transaction.atomic():
    place(41)
    transaction.set_rollback(True)  # it did not happen, and its ID is void

with transaction.atomic():
    place(42)
